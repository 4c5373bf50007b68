"""vLLM's servers as an engine."""

import re
from collections.abc import Sequence
from ctypes.util import find_library
from dataclasses import dataclass, field, replace
from importlib import util
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from prl.config.hardware import Machine
from prl.config.model_shape import ModelShape
from prl.engines.base import EngineMemory, EngineSpec, ServerConfig, ServerEngine
from prl.engines.vllm import command, memory
from prl.engines.vllm.cpu import pictures as on_cpu
from prl.engines.vllm.options import check_options, with_tool_parser

CORE = re.compile(r"\(EngineCore\b.*\[core\.py:\d+\] (\w+(?:\.\w+)*(?:: .*|Error))$|^(its engine core was .*)")
"""Error that vLLM's core ends with, or the signal that prl's server names; the server then ends with another
error, or with status 0."""
LATENT = "computes logprobs that are 0.3 off (latent attention)"
SIGMOID = "fails at the first request (it cannot choose experts by a sigmoid without groups)"
FAULTS_ON_CPU = {"laguna": SIGMOID, "minimax_m2": SIGMOID} | dict.fromkeys(
    ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"), LATENT
)
"""Kinds of models that vLLM gets wrong without a GPU, and how: `experiments/benchmarks/renderers.md`."""


@dataclass
class VLLMConfig(ServerConfig):
    """vLLM servers of one model."""

    _target_: str = "prl.engines.vllm.engine.VLLMEngine"
    kv_cache_gb: Annotated[int, Gt(0)] = 1
    """KV cache of a server on a CPU, GiB."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of a GPU's memory for a server."""
    tensor_parallel_size: Annotated[int, Ge(1)] = 1
    """GPUs one server spans."""
    cpu_patches: bool = True
    """Patches of vLLM for engines on a CPU: the same replies with less work, and a faster start."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further vLLM server arguments, added as +engine.args.block-size=16."""

    def gpus_on(self, device: str) -> int:
        """GPUs of one server."""
        return self.tensor_parallel_size if device == "cuda" else 0


class VLLMEngine(ServerEngine):
    """vLLM's servers: of the launcher, or those that run already."""

    Config = VLLMConfig
    adds_adapters = True
    largest_adapter = command.RANKS[-1]
    receives_weights = True
    has_priorities = True

    @classmethod
    def check(cls, config: VLLMConfig, prefix: str, machine: Machine) -> None:
        device = machine.device_of(config.device)
        check_options(config.args, prefix, device=device)
        if device == "cpu":
            of_each = f" for each of {config.servers} servers" if config.servers > 1 else ""
            key = f"{prefix}engine.kv_cache_gb={config.kv_cache_gb}{of_each}"
            machine.check_memory(config.kv_cache_gb * config.servers, key)

    @classmethod
    def fault_of(cls, model_type: str, device: str) -> str | None:
        fault = FAULTS_ON_CPU.get(model_type)
        return f"vLLM on a CPU {fault}" if fault and device == "cpu" else None

    @classmethod
    def lacks(cls, device: str, *, pictures: bool = False) -> str | None:
        if not util.find_spec("vllm"):
            return "vllm is not installed: run scripts/setup, or choose engine=transformers"
        if device == "cpu" and not find_library("numa"):
            return "no libnuma, which vLLM takes on a CPU: install libnuma1, or choose engine=transformers"
        if device == "cpu" and pictures and not on_cpu.has_torchvision():
            return "no torchvision, which vLLM takes for models that see pictures: run scripts/setup --pictures"
        return None

    @classmethod
    def with_tools(cls, config: VLLMConfig, renderer: str | None) -> VLLMConfig:
        return replace(config, args=with_tool_parser(config.args, renderer))

    @classmethod
    def memory(
        cls, config: VLLMConfig, shape: ModelShape, dtype: str, *, gpu_bytes: float | None, updated: bool
    ) -> EngineMemory:
        return memory.predicted(config, shape, dtype, gpu_bytes=gpu_bytes, updated=updated)

    @classmethod
    def command(cls, spec: EngineSpec, port: int) -> list[str]:
        return command.command_of(spec, port)

    @classmethod
    def environment(cls, spec: EngineSpec) -> dict[str, str]:
        return super().environment(spec) | command.environment_of(spec)

    @classmethod
    def explain(cls, lines: Sequence[str]) -> str:
        found = [match[match.lastindex or 0] for match in map(CORE.search, lines) if match]
        return found[-1] if found else ""
