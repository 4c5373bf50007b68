"""Groups of processes that one sends tensors to, by gloo; made for one sending, beside the groups of torch's own."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

POLL_S = 0.002
Group = Any
"""A `ProcessGroupGloo`, of which torch's stubs know neither options nor collectives."""


def listening(address: str) -> socket.socket:
    """Return a socket that listens at a free port of `address`, where the members of a group are to meet."""
    return socket.create_server((address, 0))


def gather(listener: socket.socket, secret: str, size: int, timeout_s: float, given_up: Callable[[], bool]) -> Group:
    """Make a group, as its sender. Raises RuntimeError where not all other members have come in time.

    Args:
        listener: of `listening`, which is closed.
        secret: what the other members have been told: who does not know it finds nobody at the port.
        size: the number of members, this one among them.
        timeout_s: how long it waits for another member, here and in each broadcast, seconds.
        given_up: says whether the others will not come, so that waiting has no use.
    """
    address, port = listener.getsockname()[:2]
    deadline = time.monotonic() + timeout_s
    # A store that listens by itself does so at all addresses of the machine.
    meeting = _meeting(address, port, secret, timeout_s, is_master=True, master_listen_fd=listener.detach())
    while not meeting.check([f"member {rank}" for rank in range(1, size)]):
        if given_up() or time.monotonic() > deadline:
            raise RuntimeError(f"it has not come to {address}, port {port}")
        time.sleep(POLL_S)
    return _group(meeting, 0, size, timeout_s, address)


def join(address: str, port: int, secret: str, rank: int, size: int, timeout_s: float) -> Group:
    """Join the group of a sender, who listens at `address`, as its member number `rank`. The rest is as of `gather`."""
    meeting = _meeting(address, port, secret, timeout_s, is_master=False)
    meeting.set(f"member {rank}", "")
    with socket.create_connection((address, port)) as way:
        own = way.getsockname()[0]
    return _group(meeting, rank, size, timeout_s, own)


def _meeting(address: str, port: int, secret: str, timeout_s: float, **side: Any) -> dist.PrefixStore:
    """Return the store where the members of a group meet; `side` says which one this is."""
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False, use_libuv=False, **side)
    return dist.PrefixStore(secret, store)


def _group(store: dist.PrefixStore, rank: int, size: int, timeout_s: float, own: str) -> Group:
    """Return a group whose member here listens at the address `own`.

    By itself gloo listens where the machine's name points, or at the loopback that a run's environment names.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=own)]
    return gloo(store, rank, size, options)


def broadcast(group: Group, tensor: torch.Tensor) -> None:
    """Send a tensor of the first member to the others, whose tensors in host memory get its numbers."""
    # As bytes: gloo knows some formats of numbers only.
    group.broadcast(tensor.reshape(-1).view(torch.uint8), 0).wait()


def part(group: Group) -> None:
    """Wait until all members have what was sent: with the sender's end of the group what is under way would be lost."""
    group.barrier().wait()
