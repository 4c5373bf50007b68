"""Sizes of what a model sees in a dry run: of the pictures in the first prompts, and of the part that sees them."""

import math
from collections.abc import Iterator, Sequence

from prl.config.hardware import MIB
from prl.config.schema import ModelConfig
from prl.engines.pictures import PictureProcessor
from prl.launch.builder import PreparedRun
from prl.launch.prompts import pictures_of, tasks_to_check
from prl.rollouts.pictures import size_of
from prl.tools.dry_run.shape import build


def sights(run: PreparedRun) -> Iterator[str]:
    """Yield a sentence for the vision tower, and one for each env whose first prompts have pictures."""
    seen = False
    for name, environment in run.environments.items():
        processor = getattr(run.renderers[name], "pictures", None)
        prompts = [pictures_of(task) for task in tasks_to_check(environment.tasks)]
        if processor is None or not any(prompts):
            continue
        seen = True
        measured = sizes(processor, prompts, tasks_of(run, name))
        yield f"pictures of {name}, in the first {len(prompts)} prompts: {measured}"
    if seen:
        yield f"the part of the model that sees has {parameters_that_see(run.config.model):,} parameters"


def tasks_of(run: PreparedRun, name: str) -> float:
    """Return the number of an env's tasks in a step; NaN where a step is counted in tokens."""
    weights = {name: env.weight for name, env in run.config.envs.items()}
    rollouts = run.config.orchestrator.batch_size or math.nan
    return rollouts / run.config.group_size_of(name)[1] * weights[name] / sum(weights.values())


def sizes(processor: PictureProcessor, prompts: Sequence[Sequence[str]], tasks: float) -> str:
    """Return how many pictures prompts have, by digests, and how large those are, also of a step of so many tasks."""
    shown = [processor.seen(digest).picture for prompt in prompts for digest in prompt]
    pixels = [picture.width * picture.height for picture in shown]
    tokens = [picture.length for picture in shown]
    features = [size_of(processor.store.features(picture)) / MIB for picture in shown]
    each = f"{extent(pixels)} pixels, {extent(tokens)} tokens and {extent(features)} MiB of features"
    step = "" if math.isnan(tasks) else f"; {tasks * sum(features) / len(prompts):.3g} MiB a step"
    return f"{len(shown) / len(prompts):.3g} a prompt, each of {each}{step}"


def extent(values: Sequence[float]) -> str:
    """Return the least and the greatest of numbers, one where they are equal."""
    ends = f"{min(values):,.4g}", f"{max(values):,.4g}"
    return " to ".join(dict.fromkeys(ends))


def parameters_that_see(model: ModelConfig) -> int:
    """Return the number of parameters outside of the language model."""
    from transformers import AutoConfig

    from prl.trainer.architecture import language_of

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    built = build(config, f"model.path={model.path!r}", trained=True)
    parts = language_of(built), built.get_output_embeddings()
    language = {id(weight) for part in parts for weight in part.parameters()}
    return sum(weight.numel() for weight in built.parameters() if id(weight) not in language)
