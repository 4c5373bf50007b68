"""The run that `run.resume=<run or checkpoint>` or `run.fork=…` names among overrides, whose config others go over."""

import os
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from prl.base.errors import ConfigError
from prl.config.groups import options
from prl.config.run_yaml import load, quoted
from prl.config.schema import AUTO
from prl.config.suggestions import override_key

NOW = "${now:%Y%m%d-%H%M%S-%f}"
"""The time in the name of a run that was given none (conf/train.yaml)."""


def over_named_run(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The run whose config a run goes on with or forks, and the overrides to compose over it; None = neither.

    Raises ConfigError where there is no such run, or one does not go on in its own directory.
    """
    typed = {override_key(argument): argument.partition("=")[2].strip("'\"") for argument in arguments}
    given = {key: typed[key] for key in ("run.resume", "run.fork") if typed.get(key, "") not in ("", AUTO, "null")}
    if not given:
        return None, arguments
    key, text = given.popitem()
    if given:
        raise ConfigError("run.resume=<run> goes on with a run, and run.fork=<run> begins a new one: leave one out")
    path = Path(os.path.abspath(Path(text).expanduser()))  # as Hydra writes run.dir
    run_dir = run_of(path, text, key)
    load(run_dir / "config.yaml")  # raises ConfigError
    named = {key: path} | ({"run.dir": run_dir, "run.name": run_dir.name} if key == "run.resume" else {})
    for argument in arguments:
        key, value = override_key(argument), argument.partition("=")[2].strip("'\"")
        there = os.path.abspath(value) if key == "run.dir" else value
        if key not in ("run.resume", "run.fork") and there != str(named.get(key, there)):
            raise ConfigError(f"{argument}: a run goes on in its own directory, {run_dir}: leave {key} out")
    rest = [argument for argument in arguments if override_key(argument) not in named]  # `resume=auto` of a fork stays
    groups = options()  # of which the run's config lists none, so that Hydra wants a `+`, and takes none twice
    options_of = [each for each in rest if each.partition("=")[0].partition("@")[0] in groups]
    chosen = {override_key(each): f"+{each}" for each in options_of}
    own = [f"{key}={quoted(value)}" for key, value in named.items()]
    return run_dir, [*chosen.values(), *(each for each in rest if each not in options_of), *own]


def run_of(path: Path, given: str, key: str = "run.resume") -> Path:
    """The run directory that `path` is, or is a checkpoint of; `given` was typed for `key`. Raises ConfigError."""
    for folder in (path, path.parent.parent):
        if given and (folder / "config.yaml").is_file() and (folder == path or path.parent.name == "checkpoints"):
            return folder
    auto = ", or run.resume=auto for the run of run.dir" if key == "run.resume" else ""
    raise ConfigError(f"{key}={given!r} is neither a run directory nor a checkpoint of one: give one of them{auto}")


def absolute(path: Any) -> Any:
    """The path of a run directory from the root; an empty one, or no path, stays as it is, to be refused."""
    text = str(path) if isinstance(path, str | int) else ""
    return os.path.abspath(os.path.expanduser(text)) if text.strip() else path


def check_named(cfg: DictConfig) -> None:
    """Raise ConfigError for `run.resume=auto` in a directory that is named after the time: it never holds a run.

    `cfg` is the composed config, its interpolations as they are.
    """
    run = cast(dict[str, Any], OmegaConf.to_container(cfg.run, resolve=False))
    if run.get("resume") == AUTO and NOW in str(run["dir"]).replace("${run.name}", str(run["name"])):
        raise ConfigError("run.resume=auto: by default a run's name has the time in it: name it, run.name=<name>")
