"""What to write instead: for keys that other versions of such systems have, and for misspelt ones."""

import contextlib
import difflib
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

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
    given = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    for key in map(override_key, given):
        if (hint := retired(key)) is not None:
            print(f"error: there is no {key!r} here: {hint}", file=sys.stderr)
            raise SystemExit(2)
    groups = {path.name for path in conf.iterdir() if path.is_dir()}
    if (problem := misused_groups(arguments, groups)) is not None:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2)
    try:
        job()
    except SystemExit as end:
        if end.code and not _started:
            config = composed(given, groups, conf, root)
            for argument in given:
                for hint in misspelt(argument, config, groups):
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
        if value in ("null", ""):
            why = ", or leave it out: there is none by default" if group == "experiment" else "; there is always one"
            return f"{group}={value}: choose an option of {group}{why}"
        names = [name.strip() for name in value.strip("[]").split(",")]
        if value.startswith("[") and len(set(names)) < len(names):
            return (
                f"{group}={value}: an option stands there twice (+env@envs.<name>=<option> adds it under another name)"
            )
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


def composed(arguments: list[str], groups: set[str], conf: Path, root: str = "train") -> "DictConfig":
    """The config of the options chosen for groups among `arguments`, of those that compose, and of the defaults."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    search = [argument for argument in arguments if override_key(argument) == "hydra.searchpath"]
    choices = [argument for argument in arguments if re.split("[@/]", override_key(argument))[0] in {*groups, "schema"}]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base="1.3"):
        config, fine = compose(root), []
        for argument in search + choices:
            with contextlib.suppress(Exception):  # Hydra has said what is wrong with it
                config = compose(root, [*fine, argument])
                fine.append(argument)
    return config


def misspelt(argument: str, config: "DictConfig", groups: set[str]) -> list[str]:
    """Hints for an override of a key that `config` does not have, or of a node that has keys of its own."""
    from omegaconf import DictConfig, OmegaConf

    key, value = override_key(argument), argument.split("=", 1)[1].strip()
    if argument.startswith("+") or key in groups or key.startswith("hydra.") or "@" in key or "/" in key:
        return []
    node, prefix, parts = config, [], key.split(".")
    for part in parts:
        child = node._get_node(part) if part in node else None
        if not isinstance(child, DictConfig) or child._is_none():
            break
        node, prefix = child, [*prefix, part]
    known = {*flatten(config), *groups}
    if key in known and (prefix != parts or value == "null" or value.startswith(("{", "${"))):
        return []
    names = sorted(str(name) for name in node if name != "_target_")
    listed = [f"keys of {'.'.join(prefix) or 'the top level'}: {', '.join(names)}"] if names else []
    if key in known:
        return [f"{key}: did you mean {key}._target_?"] if "_target_" in node else listed
    missing = parts[len(prefix)]
    if prefix == parts[:2] and prefix[:1] == ["envs"] and missing == "algo":
        chosen = f"+algo@{'.'.join(prefix)}.algo=<name>"
        return [f"{key}: an env's own algorithm is chosen with {chosen}, and has its keys then", *listed]
    free = OmegaConf.get_type(node) is dict and prefix != ["envs"]
    if free and not difflib.get_close_matches(missing, names):
        return [f"{key}: a key that is not there yet takes a +: +{key}={value}", *listed]
    known -= {".".join(prefix[:end]) for end in range(1, len(prefix) + 1)}  # what it lies in was not meant
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.7)
    close += [other for other in sorted(known) if other.split(".")[-1] == parts[-1] and other not in close]
    return [*([f"{key}: did you mean {' or '.join(close[:4])}?"] if close else []), *listed]


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
