"""The machine that a config is for: this one or, in a dry run, the one that `machine` describes."""

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from prl.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30


@dataclass
class MachineConfig:
    """The machine of a dry run (`dry_run=true`); null = as this one."""

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
    found = [] if _assumed.gpus is not None and _assumed.gpu_memory_gb is not None else listed()
    count = len(found) if _assumed.gpus is None else _assumed.gpus
    if _assumed.gpu_memory_gb is not None:
        return [int(_assumed.gpu_memory_gb * GIB)] * count
    if count > len(found) and not found:
        raise ConfigError(f"of {count} GPUs the memory is not known here: give it, machine.gpu_memory_gb=<GiB of one>")
    return [found[min(place, len(found) - 1)] for place in range(count)]


def listed() -> list[int]:
    """Memory of each GPU that `nvidia-smi` finds here, bytes."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return []
    return [int(line) * MIB for line in said.stdout.split() if line.isdigit()] if said.returncode == 0 else []
