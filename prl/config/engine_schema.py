"""Options of the ways to run a model, of which vLLM's are in `prl.config.schema`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le
from omegaconf import MISSING

from prl.config.gpus import device_type
from prl.config.signature import Seconds


@dataclass
class EngineConfig:
    """What every way to run a model has."""

    _target_: str = MISSING
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where `nvidia-smi` finds a GPU, else the CPU."""
    max_num_seqs: Annotated[int, Ge(1), Le(65536)] = 256
    """Sequences an engine runs at once."""
    threads: Annotated[int, Ge(1)] | None = None
    """CPU threads of one engine; null = its share of the cores, at most one for each 2.5 million parameters, and 8
    where it has a GPU."""
    update_timeout_s: Seconds = 300.0
    """Deadline for one weight update of the policy, seconds. A frozen model is not updated."""

    @property
    def device_type(self) -> str:
        """What `device` means on this machine: `cpu` or `cuda`."""
        return device_type(self.device)


@dataclass
class TransformersConfig(EngineConfig):
    """transformers' model in the process of the run: nothing to start. For small models, debugging and tests."""

    _target_: str = "prl.engines.transformers.TransformersEngine"
    in_process: ClassVar[bool] = True
    """Its models are in the process of the run: no launcher starts any, and no HTTP client reaches them."""
    servers: ClassVar[int] = 0
    urls: ClassVar[Sequence[str]] = ()
    port: ClassVar[None] = None
    args: ClassVar[Mapping[str, Any]] = {}
    tensor_parallel_size: ClassVar[int] = 1
    restarts: ClassVar[int] = 0
    startup_timeout_s: ClassVar[float] = 600.0
