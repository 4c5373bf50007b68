"""Which GPUs each server and each rank of a run has."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from prl.config import hardware
from prl.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Placement:
    """GPUs by name; empty where a process sees all that there are."""

    engines: tuple[tuple[str, ...], ...]
    """Of each of the policy's servers."""
    trainer: tuple[str, ...]
    """Of the trainer, one for each rank."""
    teachers: tuple[tuple[str, ...], ...]
    """Of each server of the hosted teacher."""


@dataclass(frozen=True)
class Needs:
    """How many GPUs a run asks for; what computes on the CPU asks for none."""

    engines: int = 0
    """The policy's servers."""
    engine_gpus: int = 1
    """GPUs that each of them spans."""
    ranks: int = 0
    """Of the trainer."""
    teachers: int = 0
    """Servers of the hosted teacher."""
    teacher_gpus: int = 1

    @property
    def total(self) -> int:
        return self.engines * self.engine_gpus + self.ranks + self.teachers * self.teacher_gpus


def place(needs: Needs, gpus: Sequence[str]) -> Placement:
    """Give the servers their GPUs, then the trainer's ranks, then the teacher's servers; a single GPU is shared by all.

    Raises ConfigError where they do not suffice.
    """
    if len(gpus) <= 1 and max(needs.engines * needs.engine_gpus, needs.ranks, needs.teachers * needs.teacher_gpus) <= 1:
        return Placement(((),) * needs.engines, (), ((),) * needs.teachers)
    if needs.total > len(gpus):
        parts = [
            (needs.engines, f"inference.servers={needs.engines} of tensor_parallel_size={needs.engine_gpus}"),
            (needs.ranks, f"trainer.num_processes={needs.ranks}"),
            (
                needs.teachers,
                f"teacher.inference.servers={needs.teachers} of tensor_parallel_size={needs.teacher_gpus}",
            ),
        ]
        asked = " and ".join(text for count, text in parts if count)
        raise ConfigError(
            f"{asked} take {needs.total} GPUs, each its own, and this machine has {len(gpus)} ({VISIBLE}, nvidia-smi): "
            "lower one of them"
        )
    left = list(gpus)

    def take(count: int) -> tuple[str, ...]:
        taken, left[:count] = tuple(left[:count]), []
        return taken

    engines = tuple(take(needs.engine_gpus) for _ in range(needs.engines))
    trainer = take(needs.ranks)
    return Placement(engines, trainer, tuple(take(needs.teacher_gpus) for _ in range(needs.teachers)))


def visible_gpus() -> list[str]:
    """The GPUs that the run may use, by the names that `CUDA_VISIBLE_DEVICES` takes; of another machine by number."""
    if (count := hardware.assumed().gpus) is not None:
        return [str(number) for number in range(count)]
    given = os.environ.get(VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(number) for number in range(len(hardware.listed()))]
