"""How the trainer and the workers of engines meet, and find out what can carry tensors from one to the others.

Not at a TCP store: that listens on the network and asks nobody who it is, and vLLM's own way to meet unpickles what it
finds there. Peers meet by a file in a folder that is the user's alone. Those who reach the sender's socket are on its
machine: where all do, and their tensors are on its device, they have its buffers. Else they are a process group.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prl.text import in_one_line
from prl.wire.peers import Peers, TransferFailed, Wait
from prl.wire.process_group import Group
from prl.wire.shared_buffers import place_of
from prl.wire.shared_memory import Door, Link, Shared, link_to

NEAR, FAR = "near", "far"


def meet(store: str, rank: int, world_size: int, *, device: torch.device, timeout_s: float) -> Peers:
    """Meet the others.

    Args:
        store: Path of the file at which they meet; new for each set of peers.
        rank: 0 is the sender.
        world_size: Peers.
        device: Where this peer's tensors are.
        timeout_s: Deadline for the others to come, and for each bucket to pass, seconds.

    Raises:
        TransferFailed: Naming a peer that did not come, or what kept them from meeting.
    """
    if not Path(store).parent.is_dir():  # torch would look for it for minutes
        raise TransferFailed(f"{store}: there is no such folder to meet in")
    try:
        shelf = dist.FileStore(store)
        links = _links(shelf, rank, world_size, place_of(device), Wait(store, timeout_s, "to meet"))
        if links is not None:
            return Shared(links, sends=rank == 0, store=store, device=device, timeout_s=timeout_s)
        return Group(shelf, rank, world_size, store=store, device=device, timeout_s=timeout_s)
    except (RuntimeError, ValueError, OSError) as error:
        raise TransferFailed(f"the peers of a weight transfer could not meet: {in_one_line(error)}") from error


def _links(shelf: Any, rank: int, world_size: int, place: str, wait: Wait) -> list[Link] | None:
    """Connections to the other side, where all receivers have one to the sender; otherwise None.

    Each peer writes one line: the sender where it is found, and then each receiver whether it has found it.
    """

    def said_by(peer: int) -> str:
        while not shelf.check([_line(peer)]):
            wait.pause(f"{named(peer)} has not come")
        return str(shelf.get(_line(peer)), "utf-8")

    def named(peer: int) -> str:
        return f"peer {peer} of {world_size}"

    with contextlib.ExitStack() as unused:
        links: list[Link] = []
        if rank == 0:
            door = unused.enter_context(contextlib.closing(Door(world_size - 1)))
            shelf.set(_line(0), f"{place} {door.path}")
        else:
            there, _, path = said_by(0).partition(" ")
            if there == place and path and (link := link_to(path, named(rank), named(0))) is not None:
                links.append(unused.enter_context(contextlib.closing(link)))
            shelf.set(_line(rank), NEAR if links else FAR)
        if FAR in [said_by(peer) for peer in range(1, world_size)]:
            return None
        if rank == 0:
            return [door.enter() for _ in range(1, world_size)]
        unused.pop_all()
        return links


def _line(peer: int) -> str:
    return f"here/{peer}"
