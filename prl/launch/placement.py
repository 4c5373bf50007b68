"""Which node of a job, and which of its GPUs, each engine and each rank of the trainer gets."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prl.errors import ConfigError


class Place(NamedTuple):
    """Where a process runs."""

    node: int
    """From 0, the node of the orchestrator."""
    gpus: tuple[int, ...] = ()
    """Of the node's, from 0. Empty: it computes on the CPU."""


class Placement(NamedTuple):
    """Where the engines and the ranks of a run are, each in their order."""

    engines: list[Place]
    ranks: list[Place]

    @property
    def rank_nodes(self) -> int:
        """Nodes that have a rank."""
        return len({place.node for place in self.ranks})


def placed(nodes: int, gpus_per_node: int, engines: Sequence[int], ranks: int) -> Placement:
    """Place a run's processes: engines from the first GPU on, then ranks, each on GPUs of its own while there are any.

    Ranks that find no free GPU share those of the engines. Without GPUs the engines are on one node after the other and
    the ranks on all, in blocks of nearly equal size. The places of engines do not depend on what is named after them.

    Args:
        nodes: of the job.
        gpus_per_node: GPUs that the job has on each; 0 = none.
        engines: GPUs that each engine spans; 0 for one on the CPU.
        ranks: of the trainer.

    Raises:
        ConfigError: an engine spans more than a node, or there are not enough GPUs.
    """
    at, places = 0, list[Place]()
    for number, size in enumerate(engines):
        if size > gpus_per_node:
            raise ConfigError(
                f"an engine spans {size} GPUs (inference.tensor_parallel_size), and launcher.gpus_per_node="
                f"{gpus_per_node}: an engine is on one node"
            )
        if size and at % gpus_per_node + size > gpus_per_node:  # the rest of the node is too small
            at += gpus_per_node - at % gpus_per_node
        node = at // gpus_per_node if size else number % nodes
        places.append(Place(node, tuple((at + each) % gpus_per_node for each in range(size))))
        at += size
    total = nodes * gpus_per_node
    if at > total:
        raise ConfigError(
            f"launcher.nodes={nodes} with launcher.gpus_per_node={gpus_per_node}: the {len(engines)} engines take {at} "
            "GPUs: ask for more, or for fewer engines"
        )
    if not gpus_per_node:
        return Placement(places, [Place(rank * nodes // ranks) for rank in range(ranks)])
    if ranks > total:
        raise ConfigError(
            f"trainer.num_processes={ranks}: launcher.nodes={nodes} with launcher.gpus_per_node={gpus_per_node} makes "
            f"{total} GPUs, and each rank needs one of its own"
        )
    taken = {(place.node, gpu) for place in places for gpu in place.gpus}
    every = [(node, gpu) for node in range(nodes) for gpu in range(gpus_per_node)]
    free = [each for each in every if each not in taken]
    chosen = sorted([*free, *sorted(taken)][:ranks])
    return Placement(places, [Place(node, (gpu,)) for node, gpu in chosen])


def check_used(placement: Placement, nodes: int) -> None:
    """Raise ConfigError where a node has nothing to do."""
    used = {0, *(place.node for place in (*placement.engines, *placement.ranks))}
    if idle := sorted(set(range(nodes)) - used):
        raise ConfigError(
            f"launcher.nodes={nodes}: node {idle[0] + 1} would have nothing to do. Raise trainer.num_processes, now "
            f"{len(placement.ranks)}, or ask for {len(used)}"
        )


def visible_devices(gpus: Sequence[int], environ: Mapping[str, str]) -> str:
    """`CUDA_VISIBLE_DEVICES` for the GPUs with these numbers, among those that `environ` shows.

    Raises ConfigError where it shows fewer.
    """
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return ",".join(map(str, gpus))
    names = [name for name in shown.split(",") if name]
    if max(gpus) >= len(names):
        raise ConfigError(
            f"launcher.gpus_per_node={max(gpus) + 1} or more, and this node shows the job {len(names)} GPUs "
            f"(CUDA_VISIBLE_DEVICES={shown}): give the number that the job was allocated"
        )
    return ",".join(names[gpu] for gpu in gpus)
