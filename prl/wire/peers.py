"""The process group in which the trainer sends tensors to the workers of engines: gloo on CPUs, NCCL on GPUs.

Not a TCP store's: that listens on the network and asks nobody who it is, and vLLM's own way to meet unpickles what it
finds there. Peers meet by a file in a folder that is the user's alone. Where gloo and NCCL listen then, the launcher
says (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`): on loopback, unless it is told otherwise.

Written for torch 2.13: an independent group, beside the default one, has no public constructor but its class.
"""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.errors import PrlError
from prl.text import in_one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from prl.wire.buckets import Place

POLL_S = 0.0002
LOOK_S = 0.05
"""Time between two looks at whether a transfer has been called off, seconds."""

LEFT: list[tuple[Any, list[Any]]] = []
"""Groups that were left while something was on its way, and that: to remove one would wait for it."""


def buffers(cut: "Sequence[Sequence[Place]]", device: "torch.device") -> "list[torch.Tensor]":
    """Memory for two buckets: one on its way, and one that is packed or loaded meanwhile."""
    import torch

    sizes = [max((bucket[-1].stop for bucket in cut[start::2]), default=0) for start in (0, 1)]
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


class TransferFailed(PrlError):
    """Weights did not pass, or not all of them: a peer is gone, called it off, or did not come in time."""


def called_off(store: str) -> Path:
    """The file whose presence calls off what the peers that meet at `store` do."""
    return Path(f"{store}.off")


class Peers:
    """This process among its peers, of which peer 0 sends. Every wait has a deadline, and can be called off."""

    def __init__(self, store: str, rank: int, world_size: int, *, device: "torch.device", timeout_s: float):
        """Meet the others.

        Args:
            store: Path of the file at which they meet; new for each set of peers.
            rank: 0 is the sender.
            world_size: Peers.
            device: Where this peer's tensors are.
            timeout_s: Deadline for the others to come, and for each tensor to pass, seconds.

        Raises:
            TransferFailed: Naming a peer that did not come, or what kept them from meeting.
        """
        import torch.distributed as dist

        if not Path(store).parent.is_dir():  # torch would look for it for minutes
            raise TransferFailed(f"{store}: there is no such folder to meet in")
        self.store, self.device, self.timeout_s = store, device, timeout_s
        self._off = str(called_off(store))
        self._under_way: list[Any] = []
        try:
            self._store = dist.FileStore(store)
            self._store.set(_here(rank), "1")
            waiting = [peer for peer in range(world_size) if peer != rank]
            deadline = _Wait(self, "to meet")
            while waiting := [peer for peer in waiting if not self._store.check([_here(peer)])]:
                deadline.pause(f"peer {waiting[0]} of {world_size} has not come")
            self._group = self._connected(dist, rank, world_size)
        except (RuntimeError, ValueError, OSError) as error:
            raise TransferFailed(f"the peers of a weight transfer could not meet: {in_one_line(error)}") from error

    def _connected(self, dist: Any, rank: int, world_size: int) -> Any:
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=2 * self.timeout_s)  # its watchdog would end the process: ours first
            return dist.ProcessGroupNCCL(self._store, rank, world_size, options)
        return dist.ProcessGroupGloo(self._store, rank, world_size, timedelta(seconds=self.timeout_s))

    def broadcast(self, tensor: "torch.Tensor") -> Any:
        """Begin to send, or receive, a tensor of the same bytes everywhere; `wait` for what this returns."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise TransferFailed(f"weights did not pass: {in_one_line(error)}") from error
        self._under_way.append(work)
        return work

    def wait(self, work: Any) -> None:
        """Return when what `broadcast` began is done. Raises TransferFailed."""
        deadline = _Wait(self, "for weights to pass")
        try:
            while not work.is_completed():
                deadline.pause("a peer is silent")
            self._under_way.remove(work)
            work.wait()
        except RuntimeError as error:
            raise TransferFailed(f"weights did not pass: {in_one_line(error)}") from error

    def close(self) -> None:
        """Leave them. Returns at once; gloo lets go of connections that are in use at their deadline alone."""
        if self.device.type == "cuda":
            self._group.abort()
        LEFT[:] = [(group, works) for group, works in LEFT if not all(work.is_completed() for work in works)]
        if not all(work.is_completed() for work in self._under_way):
            LEFT.append((self._group, self._under_way))
        del self._group, self._store


class _Wait:
    """A wait with its deadline."""

    def __init__(self, peers: Peers, what: str):
        self.peers, self.what = peers, what
        self.began = self.looked = time.monotonic()

    def pause(self, missing: str) -> None:
        """Sleep for a moment. Raises TransferFailed at the deadline, or where the transfer has been called off."""
        now = time.monotonic()
        if now - self.began > self.peers.timeout_s:
            raise TransferFailed(f"waited {self.peers.timeout_s:g} s {self.what}: {missing}")
        if now - self.looked > LOOK_S:
            self.looked = now
            if os.path.exists(self.peers._off):
                raise TransferFailed("the transfer was called off: another peer had failed")
        time.sleep(POLL_S)


def _here(rank: int) -> str:
    return f"here/{rank}"
