"""What passes between the run and the processes of an env's code: frames of msgpack, and marks in shared memory.

A frame holds numbers, texts, lists and mappings: nothing that is read from one runs.
"""

import asyncio
import mmap
from typing import Any

import msgspec

from prl.errors import UNREADABLE

MAX_FRAME = 64 << 20
"""[bytes] Largest frame that is read."""


class Marks:
    """Memory that a worker and the run share: which call it is executing, and how often it has taken one up.

    It says whose code a worker stands in, also when that code never comes back or has ended the process.
    """

    def __init__(self, slots: int):
        self._memory = mmap.mmap(-1, 16 * slots)
        self._numbers = memoryview(self._memory).cast("Q")

    def enter(self, slot: int, number: int) -> None:
        self._numbers[2 * slot] = number
        self._numbers[2 * slot + 1] += 1

    def leave(self, slot: int) -> None:
        self._numbers[2 * slot] = 0

    def read(self, slot: int) -> tuple[int, int]:
        """Return the number of the call, 0 for none, and the count."""
        return self._numbers[2 * slot], self._numbers[2 * slot + 1]


def frame(message: dict[str, Any]) -> bytes:
    """Return a message as it is sent. Raises TypeError or ValueError for what is no plain data."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message; None at the end, or where what comes is none."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "big")
        message = msgspec.msgpack.decode(await reader.readexactly(length)) if length <= MAX_FRAME else None
    except (asyncio.IncompleteReadError, OSError, *UNREADABLE):
        return None
    return message if isinstance(message, dict) else None
