"""Which node of a run, and which of its GPUs, each engine and each rank of the trainer has."""

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


class Place(NamedTuple):
    """Where a process runs."""

    node: int = 0
    """From 0, the node of the orchestrator."""
    gpus: tuple[int, ...] = ()
    """Of those that the node may use, from 0. Empty: it computes on the CPU."""


HERE = Place()


class Placement(NamedTuple):
    """Where the processes of a run are, each kind in its order."""

    engines: list[Place]
    """The policy's servers."""
    ranks: list[Place]
    teachers: list[Place]
    """The servers of the hosted teacher."""

    @property
    def shares_gpu(self) -> bool:
        """Whether processes have a GPU together."""
        taken = [each.gpus for kind in self for each in kind if each.gpus]
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
            (
                self.engines * self.engine_gpus,
                f"inference.servers={self.engines} of tensor_parallel_size={self.engine_gpus}",
            ),
            (self.ranks * self.rank_gpus, f"trainer.num_processes={self.ranks}"),
            (
                self.teachers * self.teacher_gpus,
                f"teacher.inference.servers={self.teachers} of tensor_parallel_size={self.teacher_gpus}",
            ),
        ]

    def least(self) -> int:
        """GPUs of a single node that are enough: one, where that can be shared by all, else one for each process."""
        counts = [count for count, _ in self.of_each()]
        return 1 if max(counts) == 1 else sum(counts)


def place(needs: Needs, nodes: int, gpus: int) -> Placement:
    """Give the servers their GPUs, then the trainer's ranks, then the teacher's servers; a single GPU is shared by all.

    A server is on one node. Servers without GPUs take turns over the nodes, and ranks without are on all of them in
    blocks of nearly equal size.

    Args:
        needs: What is placed.
        nodes: That there are.
        gpus: On each node.

    Raises:
        ConfigError: There are not GPUs enough, each process its own.
    """
    shared = nodes * gpus == needs.least() == 1
    free = [(node, gpu) for node in range(nodes) for gpu in range(gpus)]

    def take(count: int, size: int) -> list[Place]:
        return [place_of(number, size) for number in range(count)]

    def place_of(number: int, size: int) -> Place:
        if not size:
            return Place(number % nodes)
        if shared:
            return Place(0, (0,))
        for node in range(nodes):
            own = tuple(gpu for at, gpu in free if at == node)[:size]
            if len(own) == size:
                free[:] = [each for each in free if each[0] != node or each[1] not in own]
                return Place(node, own)
        raise ConfigError(refusal(needs, nodes, gpus))

    engines = take(needs.engines, needs.engine_gpus)
    in_blocks = [Place(rank * nodes // needs.ranks) for rank in range(needs.ranks)]
    ranks = take(needs.ranks, needs.rank_gpus) if needs.rank_gpus else in_blocks
    return Placement(engines, ranks, take(needs.teachers, needs.teacher_gpus))


def refusal(needs: Needs, nodes: int, gpus: int) -> str:
    """What is said where there are not GPUs enough."""
    asked = [(count, text) for count, text in needs.of_each() if count]
    there = f"this machine has {gpus} ({VISIBLE}, nvidia-smi)"
    if nodes > 1:
        there = f"launcher.nodes={nodes} with {gpus} each (launcher.gpus_per_node) have {nodes * gpus}"
    return (
        f"{' and '.join(text for _, text in asked)} take {sum(count for count, _ in asked)} GPUs, each its own"
        f"{', a server those of one node' * (nodes > 1)}, and {there}: lower one of them"
    )


def visible_devices(gpus: Sequence[int], environ: Mapping[str, str]) -> dict[str, str]:
    """What has a process see the GPUs with these numbers, among those that `environ` shows; nothing for none.

    Raises ConfigError where it shows fewer.
    """
    shown = environ.get(VISIBLE)
    if not gpus:
        return {}
    if shown is None:
        return {VISIBLE: ",".join(map(str, gpus))}
    names = [name.strip() for name in shown.split(",") if name.strip()]
    if max(gpus) >= len(names):
        raise ConfigError(
            f"a process is to have GPU {max(gpus)} (from 0), and this node shows {len(names)} ({VISIBLE}={shown}): "
            "give the number that it has, launcher.gpus_per_node"
        )
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
