"""How the ranks of the trainer meet, and how long they wait for each other."""

import functools
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from prl.errors import PrlError
from prl.trainer.config import MEETING_VARIABLE, TrainerConfig
from prl.wire.process_group import connected

POLL_S = 0.002
BEHIND_S = 60.0
"""By which a rank waits longer for another than that waits itself, whose error says more, seconds."""
DEADLINES = ("ready_timeout_s", "batch_timeout_s", "finish_timeout_s")
"""Of what a rank does by itself."""


def seconds(trainer: Mapping[str, Any], knob: str) -> float:
    """A deadline in a trainer's node, or its default."""
    return float(trainer.get(knob, getattr(TrainerConfig, knob)))


def patience_s(trainer: Mapping[str, Any]) -> float:
    """How long a rank waits for another in a collective, seconds.

    The other may load, wait for its batch or write meanwhile: that has a deadline of its own, whose error says more.
    """
    return max(seconds(trainer, knob) for knob in DEADLINES) + BEHIND_S


def patience(trainer: Mapping[str, Any]) -> str:
    """How long that is, in words."""
    knobs = ", ".join(f"trainer.{knob}" for knob in DEADLINES)
    return f"within {patience_s(trainer):g} s ({BEHIND_S:g} s more than the longest of {knobs})"


def meet(rank: int, world_size: int, device: torch.device, trainer: Mapping[str, Any]) -> None:
    """Connect this rank with the others. Raises PrlError at the deadline in the trainer's node."""
    cuda = device.type == "cuda"
    where: dict[str, Any] = {"init_method": None}
    if world_size == 1:
        where = {"store": dist.HashStore()}
    elif (meeting := os.environ.get(MEETING_VARIABLE)) is not None:
        where = {"init_method": f"file://{meeting}"}
    begin = functools.partial(
        dist.init_process_group,
        "cpu:gloo,cuda:nccl" if cuda else "gloo",  # gloo for what is kept in host memory
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=patience_s(trainer)),
        device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
        **where,
    )
    timeout_s = seconds(trainer, "ready_timeout_s")
    deadline = time.monotonic() + timeout_s

    def pause() -> None:
        if time.monotonic() > deadline:
            late = f"rank {rank} had not met all {world_size} ranks after {timeout_s:g} s (trainer.ready_timeout_s)"
            raise PrlError(f"{late}: do all run?")
        time.sleep(POLL_S)

    connected(begin, pause)
