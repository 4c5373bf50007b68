"""Compose a config: the options that Hydra knows, and from a composed config to typed values (`to_config`).

Conf files are plain YAML. What a key may be, the dataclasses of `prl.config.schema` say for what prl itself reads, and
the constructor of a component for its node (`prl.config.build`).
"""

import inspect
import re
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

from prl.base.errors import ConfigError
from prl.config.build import check_node, located, plain, read
from prl.config.groups import CONF as CONF
from prl.config.groups import options as options
from prl.config.named_run import absolute, check_named, over_named_run
from prl.config.orchestrator import OrchestratorConfig
from prl.config.run_yaml import quoted
from prl.config.schema import EngineConfig, TinkerConfig, TrainConfig
from prl.config.trainer import TrainerConfig
from prl.models import model_path

OF_TRAINER = ("optim", "schedule")
"""Groups whose nodes stand in `trainer`."""
REPLACING = {
    *("algo", "curriculum", "engine", "filters", "launcher", "loss", "renderer", "teacher", "weights"),
    *OF_TRAINER,
}
"""Groups whose option is all that a node has."""
MOVED = {
    "prl.transport.files.FileTransport": "prl.weights.files.FileWeights",
    "prl.transport.ray.RayTransport": "prl.weights.ray.RayWeights",
}
"""Classes of `weights` by the names that the configs of older runs have for them: those runs can be gone on with."""
SEARCHED = "hydra.searchpath=["
SLOT_MAPPING = re.compile(r"\+*([\w.-]+\.)?filters(\.(pre|post)_batch)?=\s*\{")

T = TypeVar("T")

for name, resolver in (("model", model_path), ("choice", lambda group, *, _root_: choice(group, _root_))):
    OmegaConf.register_new_resolver(f"prl.{name}", resolver, replace=True)


def choice(group: str, root: Any) -> str:
    """The option chosen of a config group."""
    chosen: str = (root.get("hydra") or HydraConfig.get()).runtime.choices.get(group, "run")
    return chosen


def compose(overrides: list[str], run_dir: Path | None = None) -> TrainConfig:
    """The config that `python -m prl.train <overrides>` would use; with `run_dir`, over the config of that run.

    Raises ConfigError for values that are refused, and Hydra's errors for keys and options that do not exist.
    """
    if run_dir is None:
        run_dir, overrides = over_named_run(overrides)
    name, folder = ("train", CONF) if run_dir is None else ("config", run_dir.absolute())
    if run_dir is not None:
        added = [override for override in overrides if override.startswith(SEARCHED)]
        paths = [quoted(f"file://{CONF}"), *(override.removeprefix(SEARCHED).removesuffix("]") for override in added)]
        overrides = [override for override in overrides if override not in added]
        overrides = [f"{SEARCHED}{','.join(paths)}]", *overrides]
    with hydra.initialize_config_dir(str(folder), version_base="1.3"):
        cfg = hydra.compose(name, allow_new_filters(overrides), return_hydra_config=True)
        return job_config(cfg, overrides)


def job_config(cfg: DictConfig, overrides: list[str]) -> TrainConfig:
    """As `to_config`, for a config with Hydra's own node in it, where prl's resolvers look."""
    known = HydraConfig.instance()
    before = known.cfg
    # The resolver `prl.choice` asks Hydra's own node for the chosen options; the config itself loses that node.
    known.set_config(cfg)
    try:
        with open_dict(cfg):
            del cfg["hydra"]
        return to_config(TrainConfig, cfg, overrides)
    finally:
        known.cfg = before


def allow_new_filters(arguments: list[str]) -> list[str]:
    """Arguments, with `++` before a mapping for filters: Hydra would refuse names that are not there yet."""
    return [f"++{arg.lstrip('+')}" if SLOT_MAPPING.match(arg) else arg for arg in arguments]


def typed(hydra_config: Any) -> list[str]:
    """The overrides that were typed for a job, with interpolations as they are: not all resolve where they stand."""
    return cast(list[str], OmegaConf.to_container(hydra_config.overrides.task, resolve=False))


def to_config(kind: type[T], cfg: DictConfig, overrides: list[str]) -> T:
    """The typed config of a composed one. `kind` is its dataclass.

    Raises ConfigError for a key without a value, for one that nothing reads, for a value of a wrong type or out of its
    bounds, for an interpolation that does not resolve, and for a run that cannot go on in its directory.
    """
    try:
        replace_chosen(cfg, overrides)
        replace_slots(cfg, overrides)
        data = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except MissingMandatoryValue:
        missing = min(OmegaConf.missing_keys(cfg))
        raise ConfigError(f"{missing} has no value: give one, {missing}=<value>") from None
    except InterpolationResolutionError as error:  # of a key that is not there too
        raise ConfigError(f"{error.full_key}: {str(error.msg).splitlines()[0]}") from error
    run = data.get("run")
    if isinstance(run, dict) and "dir" in run:
        run["dir"] = absolute(run["dir"])
        check_named(cfg)
    return typed_config(kind, data)


def typed_config(kind: type[T], data: dict[str, Any]) -> T:
    """The dataclass `kind` with the values of plain data: the one place where a config gets its types."""
    nodes = dict(data)
    if isinstance(data.get("weights"), dict):
        target = data["weights"].get("_target_")
        nodes["weights"] = data["weights"] | {"_target_": MOVED.get(target, target)}
    for name, schema in (("orchestrator", OrchestratorConfig), ("trainer", TrainerConfig)):
        if name in nodes and kind is not TinkerConfig:  # whose trainer has a type
            check_node(nodes[name], name)
            nodes[name] = read(schema, nodes[name], name)
    if "engine" in nodes:
        nodes["engine"] = engine_config(nodes["engine"], "engine")
    teacher = nodes.get("teacher")
    if isinstance(teacher, dict) and teacher.get("engine") is not None:
        nodes["teacher"] = teacher | {"engine": engine_config(teacher["engine"], "teacher.engine")}
    return read(kind, nodes)


def engine_config(node: Any, where: str) -> Any:
    """Return the options of an engine, as its class has them (`Config`). Raises ConfigError."""
    check_node(node, where)
    options = getattr(located(node, where), "Config", None)
    if not (inspect.isclass(options) and issubclass(options, EngineConfig)):
        raise ConfigError(f"{where}._target_={node['_target_']!r} is not a subclass of prl.engines.base.Engine")
    return read(options, node, where)


def replace_chosen(cfg: DictConfig, overrides: list[str]) -> None:
    """Make an option of a group that was chosen over the config of a run (`+loss=aipo`) replace the run's own.

    Hydra has merged it with what the run's config has there. What the option does not have goes, but for typed keys.
    """
    # Only over the config of a run, whose name is `config`: elsewhere an option replaces its node anyway.
    if not HydraConfig.initialized() or HydraConfig.get().job.config_name != "config":
        return
    # The option may be a file of the user's own, which Hydra finds on the search path that the command has.
    of_hydra = [*overrides, *HydraConfig.get().overrides.hydra]
    searched = list(dict.fromkeys(each for each in of_hydra if each.startswith("hydra.searchpath=")))
    typed_keys = [override.partition("=")[0].lstrip("+") for override in overrides]
    for override in overrides:
        key = override.partition("=")[0]
        group, _, package = key.lstrip("+").partition("@")
        if key.startswith("+") and group in REPLACING:
            fresh = hydra.compose(overrides=[*searched, override])
            where = package or (f"trainer.{group}" if group in OF_TRAINER else group)
            drop_others(OmegaConf.select(cfg, where), OmegaConf.select(fresh, where), where, typed_keys)


def drop_others(node: DictConfig, fresh: DictConfig, where: str, typed_keys: list[str]) -> None:
    """Drop the keys of a node that `fresh` does not have, in any depth, but for those that were typed."""
    for name in list(node):
        key, child = f"{where}.{name}", node._get_node(name)
        other = fresh._get_node(name) if name in fresh.keys() else None  # noqa: SIM118 (`in` resolves interpolations)
        if other is None and not any(f"{each}.".startswith(f"{key}.") for each in typed_keys):
            with open_dict(node):
                del node[name]
        elif isinstance(child, DictConfig) and isinstance(other, DictConfig) and not child._is_none():
            drop_others(child, other, key, typed_keys)


def replace_slots(cfg: DictConfig, overrides: list[str]) -> None:
    """Make `filters.post_batch={…}` replace the slot: Hydra has merged it with the filters that were there.

    What the value names keeps the options that it does not set; the slot's order is the value's. A filter that another
    override names stays too.
    """
    for override in OverridesParser.create().parse_overrides(list(filter(SLOT_MAPPING.match, overrides))):
        key, value = override.key_or_group, cast(dict[str, Any], override.value())
        apart = [name for other in overrides for name in re.findall(rf"^(?:[^=~]*[+@])?{re.escape(key)}\.(\w+)", other)]
        slots = {f"{key}.{slot}": named for slot, named in value.items()} if key.endswith("filters") else {key: value}
        for slot, named in slots.items():
            if isinstance(named, dict):
                merged = plain(OmegaConf.select(cfg, slot))
                kept = {name: merged[name] for name in [*map(str, named), *apart] if name in merged}
                OmegaConf.update(cfg, slot, kept, merge=False, force_add=True)
