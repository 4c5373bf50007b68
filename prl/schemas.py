"""Every schema and the config group it belongs to. Registering imports no torch, vLLM or verifiers."""

import importlib
import pkgutil
from dataclasses import is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from prl.config.schema import ServeConfig, TrainConfig
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
    """Parts of a directory name: what could nest or escape directories is replaced."""
    return "-".join("".join(c if c.isalnum() or c in "._=," else "_" for c in str(part)) for part in parts if part != "")
