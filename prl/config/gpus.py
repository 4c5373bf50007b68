"""Which GPUs each engine and each rank of the trainer has."""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from prl.config import hardware
from prl.errors import ConfigError

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
        """Whether processes have a GPU together."""
        taken = [gpus for kind in self for gpus in kind if gpus]
        return len(taken) > 1 and len(set(taken)) == 1


@dataclass(frozen=True)
class Needs:
    """What a run asks for."""

    engines: int = 0
    """The policy's servers."""
    engine_gpus: int = 0
    """GPUs that each of them spans; 0 = it computes on the CPU. So for the others."""
    ranks: int = 0
    """Of the trainer."""
    rank_gpus: int = 0
    teachers: int = 0
    """Servers of the hosted teacher."""
    teacher_gpus: int = 0

    def of_each(self) -> list[tuple[int, str]]:
        """GPUs that each kind takes, and the settings that say so."""
        return [
            (self.engines * self.engine_gpus, f"engine.servers={self.engines} of {self.engine_gpus} GPUs"),
            (self.ranks * self.rank_gpus, f"trainer.num_processes={self.ranks}"),
            (self.teachers * self.teacher_gpus, f"teacher.engine.servers={self.teachers} of {self.teacher_gpus} GPUs"),
        ]

    def least(self) -> int:
        """GPUs that are enough: one, where that can be shared by all, else one for each process."""
        counts = [count for count, _ in self.of_each()]
        return 1 if max(counts) == 1 else sum(counts)


def place(needs: Needs, gpus: int) -> Placement:
    """Give the servers their GPUs, then the trainer's ranks, then the teacher's servers; a single GPU is shared by all.

    Raises ConfigError where the machine has too few `gpus` for each process to have its own.
    """
    shared = gpus == needs.least() == 1
    counts = needs.of_each()
    if not shared and sum(count for count, _ in counts) > gpus:
        asked = [(count, text) for count, text in counts if count]
        raise ConfigError(
            f"{' and '.join(text for _, text in asked)} take {sum(count for count, _ in asked)} GPUs, each its own, "
            f"and this machine has {gpus} ({VISIBLE}, nvidia-smi): lower one of them"
        )
    free = iter(range(gpus))

    def take(count: int, size: int) -> list[Gpus]:
        if shared and size:
            return [(0,)] * count
        return [tuple(itertools.islice(free, size)) for _ in range(count)]

    engines = take(needs.engines, needs.engine_gpus)
    ranks = take(needs.ranks, needs.rank_gpus)
    return Placement(engines, ranks, take(needs.teachers, needs.teacher_gpus))


def visible_devices(gpus: Sequence[int], environ: Mapping[str, str]) -> dict[str, str]:
    """What has a process see the GPUs with these numbers, among those that `environ` shows; nothing for none."""
    shown = environ.get(VISIBLE)
    if not gpus:
        return {}
    if shown is None:
        return {VISIBLE: ",".join(map(str, gpus))}
    names = [name.strip() for name in shown.split(",") if name.strip()]
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
    """What an option `device` means on this machine: `cpu` or `cuda`."""
    if device != "auto":
        return device
    return "cuda" if has_gpu() else "cpu"


def has_gpu() -> bool:
    """Whether this machine, or the one that the config is for, has a GPU that the run may and can use."""
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
