"""Peers in a process group: gloo on CPUs of several nodes, NCCL on GPUs.

Where gloo and NCCL listen, the launcher says (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`): on loopback, unless it is
told otherwise. Written for torch 2.13: an independent group, beside the default one, has no public constructor but its
class.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from prl.text import in_one_line
from prl.wire.buckets import Place, of_two
from prl.wire.peers import Peers, TransferFailed, Wait

LEFT: list[tuple[Any, list[Any]]] = []
"""Groups that were left while something was on its way, and that: to remove one would wait for it."""


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

        Raises RuntimeError for what keeps them from that.
        """
        super().__init__(store, device=device, timeout_s=timeout_s)
        self._under_way: list[Any] = []
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=2 * timeout_s)  # its watchdog would end the process: ours first
            self._group = dist.ProcessGroupNCCL(shelf, rank, world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(shelf, rank, world_size, timedelta(seconds=timeout_s))

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
