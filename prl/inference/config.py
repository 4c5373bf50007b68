"""Config of an inference engine."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le


@dataclass
class InferenceConfig:
    """vLLM servers of one model."""

    device: Annotated[str, Literal["auto", "cpu", "cuda"]] = "auto"
    """`auto`: CUDA where `nvidia-smi` finds a GPU, else the CPU."""
    host: str = "127.0.0.1"
    """Address the server binds to. Anything but loopback opens it to the network; the run's token still guards it."""
    port: Annotated[int, Ge(1), Le(65535)] | None = None
    """TCP port; null = a free one."""
    urls: list[str] = field(default_factory=list)
    """Base URLs of prl servers that already run, with this run's token in PRL_TOKEN; empty = start one."""
    max_num_seqs: Annotated[int, Ge(1)] = 256
    """Sequences the engine runs at once."""
    kv_cache_gb: Annotated[int, Gt(0)] = 1
    """KV cache on a CPU, GiB."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of GPU memory for the engine."""
    tensor_parallel_size: Annotated[int, Ge(1)] = 1
    """GPUs one server spans."""
    poll_s: Annotated[float, Ge(0)] = 0.0002
    """Sleep between looks at the engine's message queue on a CPU, seconds; 0 = vLLM's own busy loop."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further vLLM server arguments, added as +inference.args.block-size=16."""
    startup_timeout_s: Annotated[float, Gt(0)] = 600.0
    """Deadline for the server to answer, seconds."""
    update_timeout_s: Annotated[float, Gt(0)] = 300.0
    """Deadline for one weight update of the policy, seconds. A frozen model is not updated."""
