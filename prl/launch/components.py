"""Every component of a run, built from the config and checked, and what it has to be given before anything starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from renderers.base import Renderer

from prl.algorithms.base import Algorithm
from prl.algorithms.compatibility import validate_algorithm
from prl.base.errors import ConfigError
from prl.base.user_code import contained, hook
from prl.config import trainer as trainer_config
from prl.config.build import build, maker, overridden, read, sampling_of
from prl.config.model_folder import sees_at
from prl.config.model_reference import POLICY, FrozenModelConfig, frozen_models
from prl.config.schema import ModelConfig, TeacherConfig, TrainConfig
from prl.curriculum.base import Curriculum
from prl.engines.sampler import Sampler, derive_seed, validate_for_training
from prl.envs.environment import Environment
from prl.filters.base import Filters, SlotName, build_filters
from prl.losses.options import loss_of, options_of
from prl.monitors.base import Monitor, Monitors
from prl.orchestrator.batcher import Batcher
from prl.orchestrator.orchestrator import Orchestrator
from prl.orchestrator.replay import check_replay
from prl.orchestrator.types import EnvComponents
from prl.rollouts.pictures import PictureStore
from prl.trainer.schedule import Schedule
from prl.weights.base import Weights

SCHEMAS: dict[str, Any] = {
    schema._target_: schema
    for schema in (trainer_config.TrainerConfig, trainer_config.AdamWConfig, trainer_config.SGDConfig)
}
"""Options of classes that load torch, by `_target_`."""
SOURCE = ".sampling.source"
"""The end of the config key of an algorithm's source of rollouts."""
NODES = ("algo", "curriculum", "filters", "renderer")
"""Nodes that an env may have of its own."""


@dataclass(frozen=True)
class TeacherKeys:
    """The config keys that refer to the teacher which the run hosts."""

    scorers: list[str]
    """Algorithms have it score token ids."""
    sources: list[str]
    """Algorithms sample rollouts from it."""
    asked: list[str]
    """The code of envs asks it."""


@dataclass(frozen=True)
class RunComponents:
    """The components of a run."""

    envs: dict[str, EnvComponents]
    keys: dict[str, dict[str, str]]
    """The config keys of each env's algo, curriculum, filters, renderer and group_size, by env and name."""
    orchestrator: Callable[..., Orchestrator]
    """Takes its live objects."""
    batcher: Callable[..., Batcher]
    """Takes the sizes of a batch and the envs that it mixes."""
    weights: Weights
    monitors: Monitors
    references: list[str]
    """The models that the trainer has to hold as references of samples (`Algorithm.trainer_references`)."""
    teacher: TeacherKeys


def build_components(config: TrainConfig) -> RunComponents:
    """Build and check every component but the launcher. Raises ConfigError with its config key."""
    envs = {name: _env_components(config, name) for name in config.envs}
    keys = {
        env: {name: config.node_of(env, name)[0] for name in NODES} | {"group_size": config.group_size_of(env)[0]}
        for env in envs
    }
    models = {name: env.references for name, env in config.envs.items()}
    # The settings of evaluations are the envs' samplers', built above, which may name a class of their own.
    orchestrator = replace(config.orchestrator, eval=replace(config.orchestrator.eval, sampling={}), batcher={})
    losses = {"loss": config.loss} | dict(config.node_of(name, "loss") for name in envs)
    for where, node in losses.items():
        check_loss(where, node, config.trainer)
    build(config.trainer.schedule, Schedule, "trainer.schedule")
    check_optimizers(config.trainer.optim)
    check_trainer(config.trainer)
    return RunComponents(
        envs=envs,
        keys=keys,
        orchestrator=maker(orchestrator, Orchestrator, "orchestrator"),
        batcher=maker(config.orchestrator.batcher, Batcher, "orchestrator.batcher"),
        weights=build(config.weights, Weights, "weights"),
        monitors=Monitors({name: build(node, Monitor, f"monitor.{name}") for name, node in config.monitor.items()}),
        references=sorted({name for env in envs.values() for name in env.algorithm.trainer_references()}),
        teacher=keys_of_teacher(envs, keys, models, config.hosts),
    )


def _env_components(config: TrainConfig, name: str) -> EnvComponents:
    where, node = config.node_of(name, "algo")
    algorithm = build(node, Algorithm, where)
    sampling_key, sampling = sampling_of(config, name)
    sampler = build(sampling, Sampler, sampling_key)
    curriculum_key, curriculum_node = config.node_of(name, "curriculum")
    curriculum = build(curriculum_node, Curriculum, curriculum_key)
    validate_algorithm(
        algorithm,
        where,
        env=name,
        group_size=config.group_size_of(name)[1],
        temperature=sampler.temperature,
        hosts=config.hosts,
        uses_reward_thresholds=curriculum.reads_rewards,
    )
    check_replay(curriculum.replay, f"{curriculum_key}.replay", algorithm, config.orchestrator)
    live = algorithm.sampling.source == POLICY
    validate_for_training(sampler, sampling_key, live=live, max_model_len=config.model.max_model_len)
    filters_key, filters = config.node_of(name, "filters")
    return EnvComponents(
        algorithm=algorithm,
        sampler=sampler,
        eval_sampler=build(
            overridden(sampling, config.orchestrator.eval.sampling), Sampler, "orchestrator.eval.sampling"
        ),
        curriculum=curriculum,
        filters={slot: build_filters(getattr(filters, slot), f"{filters_key}.{slot}") for slot in get_args(SlotName)},
        group_size=config.group_size_of(name)[1],
        loss="" if config.envs[name].loss is None else name,
    )


def keys_of_teacher(
    envs: Mapping[str, EnvComponents],
    keys: Mapping[str, Mapping[str, str]],
    models: Mapping[str, Mapping[str, Any]],
    hosts: Callable[[FrozenModelConfig], bool],
) -> TeacherKeys:
    """Find the config keys that refer to the hosted teacher.

    Args:
        envs: The components of each env.
        keys: The config keys of their nodes.
        models: The references of each env's code, by role.
        hosts: Returns whether a reference means the hosted teacher.
    """
    scorers: list[str] = []
    sources: list[str] = []
    asked: list[str] = []
    for name, env in envs.items():
        for key, reference in frozen_models(env.algorithm, keys[name]["algo"]):
            options = getattr(env.algorithm, "kl", None) if key.endswith(".kl.reference") else env.algorithm
            if hosts(reference) and getattr(options, "align", None) is None:
                (sources if key.endswith(SOURCE) else scorers).append(key)
        asked += [key for key, reference in frozen_models(models[name], f"envs.{name}.models") if hosts(reference)]
    return TeacherKeys(scorers, sources, asked)


def check_vocabulary(policy: Any, teacher: Any, model: ModelConfig, config: TeacherConfig, keys: TeacherKeys) -> None:
    """Refuse a hosted teacher with another tokenizer where it scores, unless by text: tokens go to it as ids.

    A source of rollouts, or a model of an env's code, may have any. It is asked by messages then, so its tokenizer
    needs a chat template.

    Args:
        policy: The policy's tokenizer.
        teacher: The teacher's.
        model: The policy.
        config: The teacher.
        keys: The config keys that refer to it.
    """
    if config.model is None or policy.get_vocab() == teacher.get_vocab():
        return
    other = f"the teacher ({config.model.path}) has another tokenizer than the policy ({model.path})"
    if keys.scorers:
        scorer = keys.scorers[0]
        raise ConfigError(
            f"{scorer}: {other}: choose one of the policy's family with teacher.model.path, teacher=endpoint, or "
            f"{scorer.rpartition('.')[0]}.align=text; algo=sft takes one of any tokenizer"
        )
    others = [*keys.sources, *keys.asked]
    if others and config.engine.in_process:
        raise ConfigError(
            f"{others[0]}: {other}, and one in this process is asked by tokens alone: choose teacher=local"
        )
    if others and not teacher.chat_template:
        raise ConfigError(f"{others[0]}: {other}, and no chat template to be asked by: choose one that has")


def check_processor(policy: Any, teacher: Any, model: ModelConfig, config: TeacherConfig, keys: TeacherKeys) -> None:
    """Refuse a hosted teacher that is given what the policy's processor makes of a picture, and would make another.

    The arguments are those of `check_vocabulary`; both models see.
    """
    # A source is asked by messages, with the pictures as they are; but not one in the run's process.
    scorers = keys.scorers + (keys.sources if config.engine.in_process else [])
    if config.model is None or not scorers:
        return
    from prl.engines.pictures import probe_of

    if probe_of(model, policy) != probe_of(config.model, teacher):
        raise ConfigError(
            f"{scorers[0]}: the teacher ({config.model.path}) makes something else of a picture than the policy "
            f"({model.path}), by its preprocessor_config.json: choose one of the policy's family with "
            "teacher.model.path; algo=sft takes any"
        )


def show_tasks(
    components: RunComponents,
    environments: dict[str, Environment],
    *,
    seed: int,
    max_model_len: int,
    vocab_size: int,
) -> None:
    """Give each env's curriculum the tasks, and its filters the sizes of what comes of them.

    Raises ConfigError for what they refuse, and where `load_from` leaves nothing to train on.

    Args:
        components: The components of the run.
        environments: The tasks of each env.
        seed: The run's seed.
        max_model_len: The longest sequence, tokens.
        vocab_size: The tokens of the tokenizer.
    """
    for name, env in components.envs.items():
        environment = environments[name]
        longest = longest_completion(env, environment, max_model_len)
        attach_filters(env.filters, components.keys[name]["filters"], vocab_size=vocab_size, longest=longest)
        with hook(components.keys[name]["curriculum"], env.curriculum, "load"):
            env.curriculum.load(environment.tasks, seed=derive_seed(seed, f"buffer/{name}"), env_name=name)
    if all(env.curriculum.ended for env in components.envs.values()):
        raise ConfigError(
            "curriculum.load_from retires every task: curriculum.easy_fraction, hard_fraction or refill takes some back"
        )


def longest_completion(env: EnvComponents, environment: Environment, max_model_len: int) -> int:
    """The longest completion of an env, tokens; of one with several turns, that of all of them together."""
    room = max_model_len - 1  # a prompt has a token at least
    limit = env.sampler.max_tokens
    if limit is None:
        limit = getattr(environment.taskset, "MAX_TOKENS", None)
    # The limit is that of a turn: several turns together may fill the sequence.
    one_turn = environment.verifiers_env is None
    return min(room, limit) if one_turn and limit is not None else room


def attach_filters(filters: Filters, where: str, *, vocab_size: int, longest: int) -> None:
    """Tell each filter, below the key `where`, the sizes of the vocabulary and of the longest completion.

    Raises ConfigError for what one refuses.
    """
    for slot, in_slot in filters.items():
        for key, each in in_slot.items():
            with hook(f"{where}.{slot}.{key}", each, "attach"):
                each.attach(vocab_size=vocab_size, longest=longest)


def picture_store(model: ModelConfig, folder: Path | None) -> PictureStore | None:
    """Return the store of the pictures that a model is shown, in a folder of the run; None if it sees none.

    Without a folder it is there for as long as it is used.
    """
    if not sees_at(model.path):
        return None
    return PictureStore.passing(model.max_pixels) if folder is None else PictureStore(folder, model.max_pixels)


def renderers_of(
    nodes: Mapping[str, tuple[str, Any]], model: ModelConfig, tokenizer: Any, pictures: PictureStore | None
) -> dict[str, Renderer]:
    """Make the renderer of each env, whose node has its config key; envs that share the run's share the object."""
    made = {where: renderer_of(where, node, model, tokenizer, pictures) for where, node in dict(nodes.values()).items()}
    return {name: made[where] for name, (where, _) in nodes.items()}


def renderer_of(
    where: str, node: Any, model: ModelConfig, tokenizer: Any, pictures: PictureStore | None = None
) -> Renderer:
    """The renderer that a node describes, for a model and its tokenizer. Raises ConfigError naming the key.

    `pictures` are those that the model is shown; None = it sees none.
    """
    options = {**node, "where": where}
    if options.get("name") == "auto" and model.renderer is not None:
        options |= {"name": model.renderer, "name_key": "model.renderer"}
    live = {}
    if pictures is not None:
        from prl.engines.pictures import PictureProcessor  # text runs have none

        live = {"pictures": PictureProcessor(model.path, tokenizer, pictures, model.trust_remote_code)}
    make = maker(options, Callable, where)
    with contained(where, "making the renderer"):
        made: Renderer = make(tokenizer, **live)
        if not made.get_stop_token_ids():
            raise ConfigError(f"model.path={model.path!r}: its tokenizer has no eos_token, so that no turn would end")
    return made


def check_loss(where: str, node: Any, trainer: trainer_config.TrainerConfig) -> None:
    """Look a loss up before anything starts, with its options. Raises ConfigError."""
    several_updates = trainer.updates_per_batch * trainer.epochs > 1
    options_of(loss_of(node, where)).check(where, several_updates=several_updates)


def check_trainer(node: trainer_config.TrainerConfig) -> None:
    """Look up a trainer of the user's own, with its options; nodes inside, which it builds itself, are not looked at.

    That loads torch, so it is left out for prl's own class, whose options have their types already.
    """
    known = SCHEMAS.get(node._target_)
    if known is not None:
        return
    from prl.trainer.trainer import Trainer

    alone = {name: value for name, value in vars(node).items() if not (isinstance(value, dict) and "_target_" in value)}
    maker(alone, Trainer, "trainer")


def check_optimizers(node: Any) -> None:
    """Refuse optimisers that cannot be made of `trainer.optim`.

    What they say of contradicting settings is known once they are made. That loads torch, so it is left out for prl's
    own AdamW with the fields of its schema.
    """
    known = SCHEMAS.get(node["_target_"], trainer_config.OptimConfig)
    names = {each.name for each in fields(known)}
    read(known, {name: value for name, value in node.items() if name in names}, "trainer.optim")
    settings = dict(node)
    parts = settings.pop("parts", None) or {}
    if known is trainer_config.AdamWConfig and set(settings) <= names and not parts:
        return
    import torch

    from prl.trainer.optim import make_optimizer

    # Made for one of each kind: some take matrices alone, and leave vectors to another.
    matrix = {"": torch.nn.Parameter(torch.zeros(1, 1))}
    with contained("trainer.optim", "making the optimiser"):
        make_optimizer(matrix | {"vector": torch.nn.Parameter(torch.zeros(1))}, settings, "trainer.optim")
        for name, part in parts.items():
            where = f"trainer.optim.parts.{name}"
            read(trainer_config.PartConfig, {key: part[key] for key in part.keys() & {"match", "dims"}}, where)
            make_optimizer(matrix, {key: part[key] for key in part.keys() - {"match", "dims"}}, where)
