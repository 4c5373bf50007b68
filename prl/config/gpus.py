"""Placement of engines and of the trainer's ranks on GPUs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prl.base.errors import ConfigError
from prl.config.hardware import VISIBLE

Gpus = tuple[str, ...]
"""The GPUs of one process, by the names that `CUDA_VISIBLE_DEVICES` takes; empty: it computes on the CPU."""


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
    """Option that says so, for messages."""

    @property
    def gpus(self) -> int:
        """GPUs that all of them take."""
        return self.count * self.size


def place(processes: Sequence[Need], gpus: Sequence[str]) -> Placement:
    """Give the servers their GPUs, then the trainer's ranks, then the teacher's servers; a single GPU is shared by all.

    Raises ConfigError where the machine has too few `gpus` for each process to have its own.
    """
    needs = [need for need in processes if need.gpus]
    taken = sum(need.gpus for need in needs)
    shared = len(gpus) == 1 and all(need.gpus == 1 for need in needs)
    if not shared and taken > len(gpus):
        raise ConfigError(
            f"{' and '.join(need.option for need in needs)} take {taken} GPUs, each its own, "
            f"and this machine has {len(gpus)} ({VISIBLE}, nvidia-smi): lower one of them"
        )
    # One iterator for all kinds: each takes on where the one before has stopped.
    free = iter(gpus)

    def take(need: Need) -> list[Gpus]:
        if shared and need.size:
            return [tuple(gpus)] * need.count
        return [tuple(itertools.islice(free, need.size)) for _ in range(need.count)]

    return Placement(*map(take, processes))


def visible_devices(gpus: Gpus) -> dict[str, str]:
    """Return what has a process see these GPUs alone; nothing for none."""
    return {VISIBLE: ",".join(gpus)} if gpus else {}
