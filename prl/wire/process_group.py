"""Peers in a process group: gloo on CPUs of several nodes, NCCL on GPUs.

Where gloo and NCCL listen, the launcher says (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`): on loopback, unless it is
told otherwise. Written for torch 2.13: an independent group, beside the default one, has no public constructor but its
class, and the deadline of a group is private.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from prl.text import in_one_line
from prl.wire.buckets import Place, of_two
from prl.wire.peers import Peers, TransferFailed, Wait

Made = TypeVar("Made")
LEFT: list[tuple[Any, list[Any]]] = []
"""Groups that were left while something was on its way, and that: to remove one would wait for it."""


def connected(connect: Callable[[], Made], pause: Callable[[], None]) -> Made:
    """What `connect` returns, which torch ends at no deadline of ours (NCCL connects peers at none at all).

    `pause` sleeps for a moment, and raises at the deadline. `connect` then goes on in a thread that nobody waits for.
    """
    done: Future[Made] = Future()

    def run() -> None:
        try:
            done.set_result(connect())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not done.done():
        pause()
    return done.result()


def share_deadline(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Give groups the deadline of the default one; those of a mesh have torch's own, NCCL's ten minutes."""
    for group in groups:
        _set_pg_timeout(deadline_of(dist.group.WORLD, device), group)


def deadline_of(group: Any, device: torch.device) -> timedelta:
    """How long a rank waits for the others in a collective of `group` on such a device."""
    found: timedelta = group._get_backend(torch.device(device.type)).options._timeout
    return found


class Group(Peers):
    """Peers that each have buffers of their own."""

    def __init__(self, shelf: Any, rank: int, world_size: int, *, store: str, device: torch.device, timeout_s: float):
        """Connect to the others, who do so now.

        Args:
            shelf: A store of torch's that all have.
            rank: 0 is the sender.
            world_size: Peers.
            store: Where they have met.
            device: Where this peer's tensors are.
            timeout_s: Deadline for the others to connect, and for each bucket to pass, seconds.

        Raises TransferFailed at that deadline, RuntimeError for what else keeps them from that.
        """
        super().__init__(store, device=device, timeout_s=timeout_s)
        self._under_way: list[Any] = []
        first = torch.zeros(1, dtype=torch.uint8, device=device)

        def connect() -> tuple[Any, Any]:
            group = self._of_torch(shelf, rank, world_size)
            return group, group.broadcast([first], dist.BroadcastOptions())  # NCCL connects in its first call

        deadline = Wait(store, timeout_s, "for all peers to connect")
        self._group, work = connected(connect, lambda: deadline.pause("a peer is silent"))
        self._under_way.append(work)
        try:
            self.wait(work)
        except TransferFailed:
            self.close()
            raise

    def _of_torch(self, shelf: Any, rank: int, world_size: int) -> Any:
        timeout = timedelta(seconds=2 * self.timeout_s)  # ours first: NCCL's watchdog would end the process
        if self.device.type != "cuda":
            return dist.ProcessGroupGloo(shelf, rank, world_size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(shelf, rank, world_size, options)

    def buffers(self, cut: Sequence[Sequence[Place]]) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=self.device) for size in of_two(cut)]

    def broadcast(self, packed: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self._group.broadcast([packed], options)
        except RuntimeError as error:
            raise TransferFailed(f"weights did not pass: {in_one_line(error)}") from error
        self._under_way.append(work)
        return work

    def wait(self, work: Any) -> None:
        deadline = Wait(self.store, self.timeout_s, "for weights to pass")
        try:
            while not work.is_completed():
                deadline.pause("a peer is silent")
            self._under_way.remove(work)
            work.wait()
        except RuntimeError as error:
            raise TransferFailed(f"weights did not pass: {in_one_line(error)}") from error

    def let_go(self, work: Any) -> None:
        """Nothing: the sender does not fill this peer's buffers."""

    def close(self) -> None:
        """Leave them. Returns at once; gloo lets go of connections that are in use at their deadline alone."""
        if self.device.type == "cuda":
            self._group.abort()
        LEFT[:] = [(group, works) for group, works in LEFT if not all(work.is_completed() for work in works)]
        if not all(work.is_completed() for work in self._under_way):
            LEFT.append((self._group, self._under_way))
        del self._group
