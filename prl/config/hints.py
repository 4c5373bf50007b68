"""What to write instead: for keys that other versions of such systems have, and for misspelt ones."""

import difflib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

RETIRED = {
    "training_mode": "algorithms are a config group: algo=grpo, algo=opd, …",
    "teacher.client": "teacher=endpoint teacher.name=… teacher.base_url=…; to host one, teacher=local teacher.model.path=…",
    "orchestrator.teacher": "a teacher belongs to the algorithm that uses it: algo.teacher; the group teacher=local|endpoint fills it",
    "algo.model": "the frozen model has the name that the algorithm gives it: algo.teacher (opd), algo.sampling.source (sft)",
    "inference.teacher": "teacher=local hosts one; its server's settings are teacher.inference",
    "student": "the model being trained is `model`",
    "orchestrator.filters": "filters are a group of their own: filters=default, filters.post_batch.<name>…",
    "orchestrator.pre_batch_filters": "filters.pre_batch.<name>…; filters=default|monitor|enforce|none fills both slots",
    "orchestrator.post_batch_filters": "filters.post_batch.<name>…; filters=default|monitor|enforce|none fills both slots",
    "pre_batch_filters": "filters.pre_batch.<name>…; filters=default|monitor|enforce|none fills both slots",
    "post_batch_filters": "filters.post_batch.<name>…; filters=default|monitor|enforce|none fills both slots",
    "orchestrator.buffer": "the buffer is a group of its own: buffer=default|pools|odf|pools_odf, buffer.easy_threshold…",
    "orchestrator.oversampling_factor": "buffer.oversampling_factor",
    "oversampling_factor": "buffer.oversampling_factor",
    "orchestrator.algo": "the algorithm is a top-level node: algo",
    "orchestrator.model": "the model is a top-level node: model",
    "orchestrator.advantage": "credit belongs to the algorithm: algo",
    "advantage": "credit belongs to the algorithm: algo",
    "advantage.type": "the algorithm is chosen with algo=<name>",
    "algo.type": "the algorithm is chosen with algo=<name>",
    "algo.loss": "an algorithm's loss component is part of its class; the rl loss is chosen with loss=<name>",
    "loss.type": "the rl loss is chosen with loss=<name>",
    "trainer.loss": "the loss is a top-level node: loss",
    "trainer.model": "the model is a top-level node: model",
    "model.name": "model.path",
    "batch_size": "orchestrator.batch_size",
    "group_size": "orchestrator.group_size",
    "lr": "trainer.optim.lr",
    "max_async_level": "orchestrator.max_async_level",
    "wandb": "monitor.wandb",
    "env.id": "envs.<name>.taskset",
}

_started = False


def job_started() -> None:
    """The config composed: whatever fails from here on is not about its keys."""
    global _started
    _started = True


def run(job: Callable[[], None], arguments: list[str], conf: Path, root: str = "train") -> None:
    """Run a Hydra job over `conf`/`root`.yaml; where it does not compose, say what the keys should have been."""
    keys = [override_key(argument) for argument in arguments if "=" in argument and not argument.startswith("-")]
    for key in keys:
        if (hint := retired(key)) is not None:
            print(f"error: there is no {key!r} here: {hint}", file=sys.stderr)
            raise SystemExit(2)
    if (problem := misused_groups(arguments, {path.name for path in conf.iterdir() if path.is_dir()})) is not None:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2)
    try:
        job()
    except SystemExit as end:
        if end.code and not _started:
            for key in keys:
                for hint in misspelt(key, conf, root):
                    print(hint, file=sys.stderr)
        raise


def misused_groups(arguments: list[str], groups: set[str]) -> str | None:
    """What is wrong with the options chosen for groups, where Hydra would say it badly or not at all."""
    given = [argument.split("=", 1) for argument in arguments if "=" in argument]
    for key, value in ((key.lstrip("+"), value) for key, value in given):
        if key in ("filters", "filters.pre_batch", "filters.post_batch") and value.strip().startswith("{"):
            return (
                f"{key}={value}: this would add to the filters that are there; to set a slot anew write filters=none and "
                "+schema/filter@filters.<slot>.<name>=<name> for each"
            )
    for group, value in ((group, value.strip()) for group, value in given if group in groups):
        if value in ("null", "") and group != "experiment":
            return f"{group}={value}: choose an option of {group}; there is always one"
        names = [name.strip() for name in value.strip("[]").split(",")]
        if value.startswith("[") and len(set(names)) < len(names):
            return f"{group}={value}: an option stands there twice (+env@envs.<name>=<option> adds it under another name)"
    counts = Counter(group for group, _ in given if group in groups)
    twice = next((group for group, count in counts.items() if count > 1), None)
    return None if twice is None else f"{twice} is given twice; for several envs write env=[a,b]"


def override_key(argument: str) -> str:
    """The config key of a command-line override, without Hydra's `+`, `++` and `~`."""
    return argument.split("=", 1)[0].lstrip("+~")


def retired(key: str) -> str | None:
    """What to write instead of `key` or of the retired node that it lies in."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        if (hint := RETIRED.get(".".join(parts[:end]))) is not None:
            return hint
    return None


def misspelt(key: str, conf: Path, root: str = "train") -> list[str]:
    """Hints for a key that the default config does not have."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base="1.3"):
        config = compose(root)
    groups = {path.name for path in conf.iterdir() if path.is_dir()}
    known = {*flatten(config), *groups}
    if key in known or "@" in key or "/" in key:
        return []
    node, prefix = config, []
    for part in key.split(".")[:-1]:
        if not isinstance(node, DictConfig) or part not in node:
            break
        node, prefix = node._get_node(part), [*prefix, part]
    hints = []
    last = key.split(".")[-1]
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.7)
    close += [other for other in sorted(known) if other.split(".")[-1] == last and other not in close]
    if close:
        hints.append(f"{key}: did you mean {' or '.join(close[:4])}?")
    if isinstance(node, DictConfig):
        where = ".".join(prefix) or "the top level"
        hints.append(f"keys of {where}: {', '.join(sorted(str(name) for name in node if name != '_target_'))}")
    return hints


def flatten(config, prefix: str = "") -> list[str]:
    """Every dotted key of a config."""
    from omegaconf import DictConfig

    keys: list[str] = []
    for name in config:
        key = f"{prefix}{name}"
        keys.append(key)
        child = config._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            keys += flatten(child, f"{key}.")
    return keys
