"""Compose a config: the schemas that Hydra knows, and from a composed config to a typed one.

Registering imports no torch, vLLM or verifiers.
"""

import difflib
import importlib
import pkgutil
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from prl.config.instantiate import with_nodes
from prl.config.schema import ServeConfig, TrainConfig
from prl.errors import ConfigError
from prl.inference.config import InferenceConfig
from prl.models import model_path
from prl.monitors.config import MonitorConfig
from prl.orchestrator import algo
from prl.orchestrator.algo.custom import CustomClassConfig
from prl.orchestrator.buffer import BufferConfig
from prl.orchestrator.config import OrchestratorConfig
from prl.orchestrator.filters import FiltersConfig
from prl.orchestrator.filters.gibberish import GibberishConfig
from prl.orchestrator.filters.repetition import RepetitionConfig
from prl.orchestrator.filters.zero_advantage import ZeroAdvantageConfig
from prl.trainer.config import AIPOLossConfig, CustomLossConfig, DefaultLossConfig, TrainerConfig

PACKAGE = Path(__file__).parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # in a wheel, in a checkout


def algorithms() -> dict[str, type]:
    """The config of each algorithm in `prl.orchestrator.algo`, which its own module defines: `algo/<module>`."""
    found = {}
    for info in pkgutil.iter_modules(algo.__path__, f"{algo.__name__}."):
        for value in vars(importlib.import_module(info.name)).values():
            if is_dataclass(value) and str(getattr(value, "_target_", None)).startswith(f"{info.name}."):
                found[f"algo/{info.name.rpartition('.')[2]}"] = value
    return found


SCHEMAS = {
    **algorithms(),
    "algo/custom_class": CustomClassConfig,
    "buffer/passes": BufferConfig,
    "filters/slots": FiltersConfig,
    "filter/gibberish": GibberishConfig,
    "filter/repetition": RepetitionConfig,
    "filter/zero_advantage": ZeroAdvantageConfig,
    "inference/vllm": InferenceConfig,
    "loss/default": DefaultLossConfig,
    "loss/aipo": AIPOLossConfig,
    "loss/custom": CustomLossConfig,
    "monitor/monitor": MonitorConfig,
    "orchestrator/orchestrator": OrchestratorConfig,
    "trainer/trainer": TrainerConfig,
}
"""A conf file takes its schema with `- /schema/<group>@_here_: <name>` in its defaults."""


def register() -> None:
    """Make the schemas and the `prl.*` resolvers known to Hydra. May be called again."""
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=TrainConfig)
    store.store(group="schema", name="serve", node=ServeConfig)
    for path, node in SCHEMAS.items():
        group, name = path.split("/")
        store.store(group=f"schema/{group}", name=name, node=node)
    OmegaConf.register_new_resolver("prl.model", model_path, replace=True)
    OmegaConf.register_new_resolver("prl.slug", slug, replace=True)
    OmegaConf.register_new_resolver("prl.choice", choice, replace=True)


def choice(group: str, *, _root_: Any) -> str:
    """The option chosen of a config group. Unlike `hydra:`, also known where a sweep's own directory is named."""
    hydra_node = _root_.get("hydra") or HydraConfig.get()
    return hydra_node.runtime.choices[group]


def slug(*parts: object) -> str:
    """RunBuilder of a directory name: what could nest or escape directories is replaced."""
    return "-".join(
        "".join(c if c.isalnum() or c in "._=," else "_" for c in str(part)) for part in parts if part != ""
    )


def to_config(cfg: DictConfig) -> Any:
    """The typed config of a composed one: a TrainConfig, or what else its root schema is."""
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"{missing[0]} has no value: give one, {missing[0]}=<value>")
    refuse_appended(cfg)
    return with_nodes(OmegaConf.to_object(cfg))


def refuse_appended(cfg: DictConfig, where: str = "") -> None:
    """Raise ConfigError for a key that `+key=value` added beside those of a schema: nothing would ever read it."""
    schema = OmegaConf.get_type(cfg)
    fields = getattr(schema, "__dataclass_fields__", None)
    for name in cfg:
        key = f"{where}{name}"
        if fields is not None and name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"keys there: {', '.join(sorted(fields))}"
            raise ConfigError(f"{key}: there is no such key in {schema.__name__}; {hint}")
        if isinstance(child := cfg._get_node(name), DictConfig) and not child._is_none():
            refuse_appended(child, f"{key}.")


def compose(overrides: list[str]) -> TrainConfig:
    """The config that `python -m prl.train <overrides>` would use; `run.name` must be among the overrides."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(hydra.compose("train", overrides))


register()
