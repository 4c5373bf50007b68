"""The meeting of the trainer's ranks, and the time that they wait for each other."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from prl.config.trainer import MEETING_VARIABLE, TrainerConfig

MARGIN_S = 60.0
"""Seconds that a rank waits for another beyond that rank's own deadlines: an error of that rank says more than a
collective that was lost."""
DEADLINES = ("ready_timeout_s", "batch_timeout_s", "finish_timeout_s")
"""Deadlines of the work that a rank does by itself: loading, waiting for its batch, writing."""


def collective_timeout(trainer: Mapping[str, Any]) -> timedelta:
    """Return the time that a rank waits for another in a collective, by the trainer's node."""
    deadlines = [trainer.get(name, getattr(TrainerConfig, name)) for name in DEADLINES]
    return timedelta(seconds=max(deadlines) + MARGIN_S)


def meet(
    rank: int, world_size: int, device: torch.device, trainer: Mapping[str, Any], meeting: str | None = None
) -> None:
    """Connect this rank with the others, or with itself where it is the only one.

    Args:
        rank: the number of this rank, from 0.
        world_size: the number of ranks.
        device: where this rank computes.
        trainer: the node `trainer`, for its deadlines.
        meeting: the file by which ranks on one machine find each other; None = as the environment says.
    """
    meeting = meeting or os.environ.get(MEETING_VARIABLE)
    where: dict[str, Any] = {"init_method": None if meeting is None else f"file://{meeting}"}
    if world_size == 1:
        # Nobody to meet: a store in memory opens no port and needs no file.
        where = {"store": dist.HashStore()}
    cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",  # gloo for what is kept in host memory
        rank=rank,
        world_size=world_size,
        timeout=collective_timeout(trainer),
        device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
        **where,
    )
