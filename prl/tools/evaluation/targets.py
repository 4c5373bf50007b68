"""Targets that the arguments of `prl.eval` and `prl.tools.chat` name: checkpoints, runs, models, endpoints."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from prl.base.checkpoint_folders import checkpoint_path, steps_of
from prl.base.errors import ConfigError, EngineError
from prl.base.text import in_one_line
from prl.config.build import plain, read
from prl.config.compose import CONF, options
from prl.config.evaluation import EndpointConfig, EvalModelConfig
from prl.config.model_folder import check_model, local_folder, positions, read_config
from prl.config.model_reference import FrozenModelConfig, check_url, is_url
from prl.config.run_yaml import load
from prl.config.schema import ModelConfig
from prl.engines.frozen import FrozenPool
from prl.tools import OUTPUTS, named

NOT_THE_SHAPE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Keys of a model's config that say nothing about the shape of its weights."""


@dataclass(frozen=True)
class Target:
    """A model that is to be evaluated."""

    name: str
    """Name in the results."""
    model: ModelConfig
    """Its weights; of an endpoint, its tokenizer."""
    endpoint: FrozenModelConfig | None = None
    """Endpoint that serves it already; None = prl's engine loads it."""


def find_targets(given: Sequence[str], settings: EvalModelConfig, endpoint: EndpointConfig) -> list[Target]:
    """The targets that are given, each under a name of its own. Raises ConfigError naming the one that cannot be had.

    Args:
        given: The arguments of the command that name models.
        settings: The settings that take the place of the models' own.
        endpoint: What is said of those that are URLs.
    """
    if not given:
        raise ConfigError("nothing to look at: give a checkpoint, a run directory, a model or an endpoint's URL")
    # Runs in two folders may have one name: then both go by their whole arguments.
    names = Counter(map(_name, given))
    own = {key: value for key, value in vars(settings).items() if value is not None}
    targets = []
    for argument in given:
        name = _name(argument) if names[_name(argument)] == 1 else argument
        if is_url(argument):
            check_url(argument, "targets", "http://127.0.0.1:8001/v1")
            reference, model = asyncio.run(look_up(argument, endpoint))
            targets.append(Target(name, replace(model, **own), reference))
        else:
            targets.append(Target(name, replace(model_of(argument), **own)))
    return targets


def _name(argument: str) -> str:
    """`run/step_000020` for a run or a checkpoint of one; else the argument."""
    folder = named(Path(argument).expanduser())
    run = None if is_url(argument) else run_of(folder)
    if run is None:
        return argument
    return f"{run.name}/{(checkpoint_of(run) if run == folder else folder).name}"


def served_name(argument: str) -> str:
    """The name under which the model of an argument is served: of a run its own, with a checkpoint that is named."""
    folder = named(Path(argument).expanduser()).absolute()
    run = run_of(folder)
    return f"{run.name}-{folder.name}" if run not in (None, folder) else folder.name


def model_of(argument: str) -> ModelConfig:
    """The model that an argument names: prl's own by name, a run's checkpoint, a model folder, or one on the hub.

    A checkpoint has its settings from the run that made it. Raises ConfigError.
    """
    if (model := bundled(argument)) is not None:
        check_model(model.path, "target")
        return model
    folder = named(Path(argument).expanduser())
    if not folder.is_dir():
        on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", argument) and not argument.startswith((".", f"{OUTPUTS}/"))
        if not on_hub or folder.parent.is_dir():
            own = ", ".join(sorted(name for name in options()["model"] if bundled(name)))
            raise ConfigError(f"{argument}: no such folder; models by name: {own}, and organisation/model on the hub")
        return ModelConfig(path=argument)  # on the hub
    run = run_of(folder)
    if run == folder:
        folder = checkpoint_of(run)
    settings = {} if run is None else read_run_config(run).get("model", {})
    path = str(settings.get("path") if run is not None and is_base(folder) else folder)
    check_model(path, "target")
    kept = {key: settings[key] for key in ("dtype", "max_model_len", "renderer") if key in settings}
    if "max_model_len" not in kept and (local := local_folder(path)) is not None:
        limit = positions(read_config(local, f"target={path!r}"))
        kept["max_model_len"] = min(ModelConfig.max_model_len, limit or ModelConfig.max_model_len)
    return ModelConfig(path=path, **kept)


def bundled(argument: str) -> ModelConfig | None:
    """One of the models that come with prl, by its name or folder."""
    for file in (CONF / "model").glob("*.yaml"):
        model = OmegaConf.load(file)
        if not OmegaConf.is_missing(model, "path") and argument in (file.stem, model.path):
            return read(ModelConfig, plain(model))
    return None


def run_of(folder: Path) -> Path | None:
    """The run directory that `folder` is, or is a checkpoint of."""
    runs = [folder] if folder.parent.name != "checkpoints" else [folder.parent.parent]
    return next((run for run in runs if (run / "config.yaml").is_file()), None)


def checkpoint_of(run: Path) -> Path:
    """The best checkpoint of a run that has kept one, else its last. Raises ConfigError where there is none."""
    checkpoints = [checkpoint_path(run, step) for step in steps_of(run)] + list((run / "checkpoints").glob("best"))
    if not checkpoints:
        raise ConfigError(f"{run} has no checkpoints yet: name its base model, by name or folder")
    return checkpoints[-1]


def is_base(checkpoint: Path) -> bool:
    """Return whether the best checkpoint of a run is the model that it began with, of which there is no copy."""
    path = checkpoint / "best.json"
    return path.is_file() and bool(json.loads(path.read_bytes())["step"] == 0)


def read_run_config(run: Path) -> dict[str, Any]:
    """`config.yaml` of a run as plain data. Raises ConfigError where it cannot be read, or is no run's."""
    config = load(run / "config.yaml")
    if "${" in json.dumps(config, default=str):
        raise ConfigError(f"{run / 'config.yaml'} is not the config of a run, which is resolved")
    return config


async def look_up(url: str, config: EndpointConfig) -> tuple[FrozenModelConfig, ModelConfig]:
    """The model that an endpoint serves. Raises ConfigError where it does not answer, or is not clear about it."""
    reference = FrozenModelConfig(config.name or "", url, config.api_key_var, config.timeout_s)
    pool = FrozenPool(reference)
    try:
        async with asyncio.timeout(config.timeout_s):
            served = await pool.served(pool.urls[0])
    except TimeoutError:
        raise ConfigError(f"{url} did not answer within {config.timeout_s:g} s (endpoint.timeout_s)") from None
    except EngineError as error:
        key = ": endpoint.api_key_var names the variable that holds its key" if error.status in (401, 403) else ""
        raise ConfigError(f"{error}{key}") from None
    finally:
        await pool.close()
    if (config.name is None and len(served) != 1) or config.name not in (None, *served):
        raise ConfigError(f"{url} serves {', '.join(served) or 'nothing'}: choose one with endpoint.name=…")
    name = config.name or next(iter(served))
    about = served[name]
    tokenizer = config.tokenizer or about.get("root") or name
    model = model_of(str(tokenizer))
    if isinstance(length := about.get("max_model_len"), int):
        model = replace(model, max_model_len=length)
    return replace(reference, name=name), model


def shape_of(model: ModelConfig) -> str:
    """Return what two models must share for one engine to load the weights of both."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).to_dict()
    except Exception as error:  # of transformers, of the hub
        raise ConfigError(
            f"{model.path}: no model config there, on this machine or on the hub ({in_one_line(error)})"
        ) from error
    shape = {key: value for key, value in config.items() if key not in NOT_THE_SHAPE}
    return json.dumps([shape, model.dtype, model.max_model_len, model.trust_remote_code], sort_keys=True, default=str)


def by_engine(targets: Iterable[Target]) -> list[list[Target]]:
    """The targets that one engine after the other can serve, in the order of their first."""
    engines: dict[str, list[Target]] = {}
    for target in targets:
        key = shape_of(target.model) if target.endpoint is None else target.name
        engines.setdefault(key, []).append(target)
    return list(engines.values())
