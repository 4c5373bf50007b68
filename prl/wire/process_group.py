"""Process groups of torch's with deadlines of ours. Written for torch 2.13, where a group's deadline is private."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

Made = TypeVar("Made")


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
