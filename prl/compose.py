"""Compose a config: the options that Hydra knows, and from a composed config to a typed one.

Every component's schema is made from its class (`schema_of`) and registered here, under `/schema/<group>/<name>` for
conf files to build on, and as the option `<group>=<name>` itself where `conf/` has no file of that name. Registering
imports no torch, vLLM or verifiers.
"""

import difflib
import importlib
import inspect
import pkgutil
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from prl import monitors
from prl.config.instantiate import plain
from prl.config.schema import FiltersConfig, ServeConfig, TrainConfig
from prl.config.signature import restore, schema_of
from prl.errors import ConfigError
from prl.inference.config import InferenceConfig
from prl.inference.renderer import RENDERERS, RendererConfig
from prl.inference.sampler import Sampler
from prl.launch.local import LocalLauncher
from prl.models import model_path
from prl.monitors.base import Monitor
from prl.orchestrator import algo, buffer, filters
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.buffer.base import Buffer
from prl.orchestrator.config import OrchestratorConfig
from prl.orchestrator.filters.base import Filter
from prl.trainer.config import (
    AIPOLossConfig,
    CustomLossConfig,
    DefaultLossConfig,
    FileTransportConfig,
    TrainerConfig,
)

PACKAGE = Path(__file__).parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # in a wheel, in a checkout

SLOT_MAPPING = re.compile(r"([\w.-]+\.)?filters(\.(pre|post)_batch)?=\s*\{")


def components(package: ModuleType, base: type) -> dict[str, type]:
    """The concrete subclasses of `base` in the modules of a package, by module name: `grpo` -> GRPOAlgorithm."""
    found = {}
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for value in vars(importlib.import_module(info.name)).values():
            is_one = inspect.isclass(value) and issubclass(value, base) and value is not base
            if is_one and value.__module__ == info.name and not inspect.isabstract(value):
                found[info.name.rpartition(".")[2]] = value
    return found


def schemas() -> dict[str, type]:
    """The schema of every component, by `<group>/<name>`."""
    found: dict[str, type] = {
        "sampling/default": Sampler,
        "renderer/auto": RendererConfig,
        "buffer/default": components(buffer, Buffer)["task_buffer"],
        "inference/default": InferenceConfig,
        "loss/default": DefaultLossConfig,
        "loss/aipo": AIPOLossConfig,
        "loss/custom": CustomLossConfig,
        "launcher/local": LocalLauncher,
        "transport/files": FileTransportConfig,
        "orchestrator/default": OrchestratorConfig,
        "trainer/default": TrainerConfig,
    }
    for group, package, base in (
        ("algo", algo, Algorithm),
        ("filter", filters, Filter),
        ("monitor", monitors, Monitor),
    ):
        found |= {f"{group}/{name}": cls for name, cls in components(package, base).items()}
    return {path: schema_of(cls) for path, cls in found.items()} | {"filters/none": FiltersConfig}


def register() -> None:
    """Make the schemas and the `prl.*` resolvers known to Hydra. May be called again."""
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=TrainConfig)
    store.store(group="schema", name="serve", node=ServeConfig)
    for path, node in schemas().items():
        group, name = path.split("/")
        store.store(group=f"schema/{group}", name=name, node=node)
        if group != "monitor" and not (CONF / f"{path}.yaml").exists():
            store.store(group=group, name=name, node=node)
    for name in RENDERERS:
        if name not in ("auto", "custom"):
            store.store(group="renderer", name=name, node=schema_of(RendererConfig)(name=name))
    OmegaConf.register_new_resolver("prl.model", model_path, replace=True)
    OmegaConf.register_new_resolver("prl.slug", slug, replace=True)
    OmegaConf.register_new_resolver("prl.choice", choice, replace=True)


def options() -> dict[str, list[str]]:
    """The options of every config group, from `conf/` and from the schemas."""
    found: dict[str, set[str]] = {}
    for path in CONF.glob("*/*.yaml"):
        found.setdefault(path.parent.name, set()).add(path.stem)
    for group, entries in ConfigStore.instance().repo.items():
        if isinstance(entries, dict) and group not in ("schema", "hydra"):
            names = [name.removesuffix(".yaml") for name, node in entries.items() if not isinstance(node, dict)]
            found.setdefault(group, set()).update(names)
    return {group: sorted(names) for group, names in sorted(found.items()) if names}


def choice(group: str, *, _root_: Any) -> str:
    """The option chosen of a config group. Unlike `hydra:`, also known where a sweep's own directory is named."""
    hydra_node = _root_.get("hydra") or HydraConfig.get()
    return hydra_node.runtime.choices[group]


def slug(*parts: object) -> str:
    """Parts of a directory name: what could nest or escape directories is replaced."""
    return "-".join(
        "".join(c if c.isalnum() or c in "._=," else "_" for c in str(part)) for part in parts if part != ""
    )


def compose(overrides: list[str]) -> TrainConfig:
    """The config that `python -m prl.train <overrides>` would use; `run.name` must be among the overrides."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(hydra.compose("train", allow_new_filters(overrides)), overrides)


def allow_new_filters(arguments: list[str]) -> list[str]:
    """Arguments, with `++` before a mapping for filters: Hydra would refuse names that are not there yet."""
    return [f"++{arg}" if SLOT_MAPPING.match(arg) else arg for arg in arguments]


def load_config(path: Path) -> TrainConfig:
    """The config of a run from its `config.yaml`. Components are plain mappings, checked and built like any other."""
    merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(path))
    config = cast(TrainConfig, OmegaConf.to_object(merged))
    for owner, name, schema in (
        (config, "orchestrator", OrchestratorConfig),
        (config, "trainer", TrainerConfig),
        (config, "inference", InferenceConfig),
        (config.teacher, "inference", InferenceConfig),
    ):
        if (node := getattr(owner, name)) is not None:
            typed = OmegaConf.structured(schema_of(schema))
            OmegaConf.set_struct(typed, False)  # knobs of a class of the user's own
            setattr(owner, name, restore(OmegaConf.to_object(OmegaConf.merge(typed, node))))
    return config


def to_config(cfg: DictConfig, overrides: list[str]) -> Any:
    """The typed config of a composed one: a TrainConfig, or what else its root schema is.

    Raises ConfigError for a mandatory key without a value, and for one that `+key=value` added where nothing reads it.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"{missing[0]} has no value: give one, {missing[0]}=<value>")
    refuse_appended(cfg)
    replace_slots(cfg, overrides)
    return restore(OmegaConf.to_object(cfg))


def refuse_appended(cfg: DictConfig, where: str = "") -> None:
    """Raise ConfigError for a key that `+key=value` added beside those of a schema: nothing would ever read it.

    Components are left to their own signatures.
    """
    schema = OmegaConf.get_type(cfg)
    known = {field.name for field in fields(schema)} if is_dataclass(schema) else None
    for name in cfg:
        key = where + str(name)
        if known is not None and schema is not None and "_target_" not in known and name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"keys there: {', '.join(sorted(known))}"
            raise ConfigError(f"{key}: there is no such key in {schema.__name__}; {hint}")
        child = cfg._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            refuse_appended(child, f"{key}.")


def replace_slots(cfg: DictConfig, overrides: list[str]) -> None:
    """Make `filters.post_batch={…}` replace the slot: Hydra has merged it with the filters that were there.

    What the value names keeps the knobs that it does not set; the slot's order is the value's.
    """
    for override in OverridesParser.create().parse_overrides(overrides):
        key, value = override.key_or_group, None if override.is_delete() else override.value()
        if key.endswith("filters") and isinstance(value, dict):
            slots = {f"{key}.{slot}": filters for slot, filters in value.items()}
        else:
            slots = {key: value}
        for slot, named in slots.items():
            if slot.endswith(("filters.pre_batch", "filters.post_batch")) and isinstance(named, dict):
                merged = OmegaConf.select(cfg, slot)
                kept = {str(name): plain(merged[str(name)]) for name in named}
                OmegaConf.update(cfg, slot, kept, merge=False, force_add=True)


register()
