"""Placement of engines and of the trainer's ranks on GPUs."""

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from prl.base.errors import ConfigError
from prl.config import hardware

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICE = re.compile(r"\d+|(GPU|MIG)-.+")


Gpus = tuple[int, ...]
"""The GPUs of one process, from 0 among those that the run may use; empty: it computes on the CPU."""


class Placement(NamedTuple):
    """The GPUs of the processes of a run, each kind in its order."""

    engines: list[Gpus]
    """The policy's servers."""
    ranks: list[Gpus]
    teachers: list[Gpus]
    """The servers of the hosted teacher."""

    @property
    def shares_gpu(self) -> bool:
        """Return whether processes have a GPU together."""
        taken = [gpus for kind in self for gpus in kind if gpus]
        return len(taken) > 1 and len(set(taken)) == 1


@dataclass(frozen=True)
class Need:
    """The processes of one kind that a run has."""

    count: int
    size: int
    """GPUs that each of them takes; 0 = it computes on the CPU."""
    option: str = ""
    """What says so, for messages."""

    @property
    def gpus(self) -> int:
        """GPUs that all of them take."""
        return self.count * self.size


def place(engines: Need, ranks: Need, teachers: Need, gpus: int) -> Placement:
    """Give the servers their GPUs, then the trainer's ranks, then the teacher's servers; a single GPU is shared by all.

    Raises ConfigError where the machine has too few `gpus` for each process to have its own.
    """
    needs = [need for need in (engines, ranks, teachers) if need.gpus]
    taken = sum(need.gpus for need in needs)
    shared = gpus == 1 and all(need.gpus == 1 for need in needs)
    if not shared and taken > gpus:
        raise ConfigError(
            f"{' and '.join(need.option for need in needs)} take {taken} GPUs, each its own, "
            f"and this machine has {gpus} ({VISIBLE}, nvidia-smi): lower one of them"
        )
    free = iter(range(gpus))

    def take(need: Need) -> list[Gpus]:
        if shared and need.size:
            return [(0,)] * need.count
        return [tuple(itertools.islice(free, need.size)) for _ in range(need.count)]

    return Placement(take(engines), take(ranks), take(teachers))


def visible_devices(gpus: Sequence[int]) -> dict[str, str]:
    """Return what has a process see the GPUs with these numbers, among those that the run may use; nothing for none."""
    if not gpus:
        return {}
    names = visible_gpus()
    return {VISIBLE: ",".join(names[gpu] for gpu in gpus)}


def visible_gpus() -> list[str]:
    """The GPUs that the run may use, by the names that `CUDA_VISIBLE_DEVICES` takes; of another machine by number."""
    if (count := hardware.assumed().gpus) is not None:
        return [str(number) for number in range(count)]
    given = os.environ.get(VISIBLE)
    if given is not None:
        names = (name.strip() for name in given.split(",") if name.strip())
        return list(takewhile(DEVICE.fullmatch, names))  # CUDA takes those before the first that is none, such as -1
    return [str(number) for number in range(len(hardware.listed()))]


def device_type(device: str) -> str:
    """Return what an option `device` means on this machine: `cpu` or `cuda`."""
    if device != "auto":
        return device
    return "cuda" if has_gpu() else "cpu"


def has_gpu() -> bool:
    """Return whether this machine, or the one that the config is for, has a GPU that the run may and can use."""
    return lacks_gpu() is None


def lacks_gpu() -> str | None:
    """Why a run cannot use a GPU here; None where it can."""
    if (given := hardware.assumed().gpus) is not None:
        return None if given else "machine.gpus=0"
    if not hardware.listed():
        return "nvidia-smi finds no GPU on this machine"
    if not visible_gpus():
        return f"{VISIBLE} is set and shows none of this machine's GPUs"
    if not hardware.has_gpu_packages():
        return "the packages installed here are those for a CPU: PRL_ENGINE=gpu scripts/setup installs the others"
    return None
