"""A call of an env's code, the process that carries it out, and how it can fail."""

import asyncio
import logging
import os
import signal
from dataclasses import dataclass, field
from typing import Any

from prl.episodes.frames import frame

log = logging.getLogger(__name__)

MAX_SHARING = 64
"""Calls in one worker, all but one of them waiting for something."""
MAX_CALLS = 2000
"""Calls that a worker carries out before it is replaced: what its code leaves behind does not pile up."""
MAX_LOGGED = 200
"""Printed lines of an env that are logged."""


class EnvProcessEnded(RuntimeError):
    """The env's code ended the process that it ran in, or had to be ended."""


class EnvCodeError(RuntimeError):
    """What the env's code raised in its process: the class is `name`."""

    def __init__(self, name: str, message: str, remote: str):
        super().__init__(message)
        self.name = name
        if remote:
            self.add_note(remote)


@dataclass(eq=False)
class Call:
    """A call, from when it is asked for until it has a result."""

    number: int
    argument: Any
    result: asyncio.Future[Any]
    tries: int = 0
    waits: bool = False
    """It has been begun, and waits or has waited for something: its worker can take another one."""

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


@dataclass(eq=False)
class Worker:
    """One process."""

    slot: int
    output: int
    """File of what it prints."""
    ended: asyncio.Future[int]
    """Its wait status, once the template has told it."""
    task: asyncio.Task[None] | None = None
    writer: asyncio.StreamWriter | None = None
    unsent: list[bytes] = field(default_factory=list)
    calls: dict[int, Call] = field(default_factory=dict)
    begun: int = 0
    printed: int = 0
    standing: tuple[int, int] = (0, 0)
    since: float = 0.0
    held: bool = False
    """A call has not come back to the event loop for `HELD_S`."""
    verdict: str | None = None
    """Why it was killed, where it was."""
    ending: bool = False
    guilty: int | None = None
    """Number of the call for which it was killed; None where the marks say who it was."""

    @property
    def free(self) -> bool:
        """Whether it can begin a call now."""
        if self.ending or self.held or self.begun >= MAX_CALLS:
            return False
        return len(self.calls) < MAX_SHARING and all(call.waits and call.tries < 3 for call in self.calls.values())

    @property
    def counts(self) -> bool:
        """Whether it is one of the few that share the processor: neither held up, nor taken by a call that waits."""
        waits = bool(self.calls) and all(call.waits for call in self.calls.values())
        return not self.ending and not self.held and (self.free or not waits)

    def send(self, message: dict[str, Any]) -> None:
        if self.writer is None:
            self.unsent.append(frame(message))
        elif not self.writer.is_closing():
            self.writer.write(frame(message))


RETIRED = "had run long enough"


def how_it_ended(status: int | None) -> str:
    """Say what a wait status means, as the end of a sentence about the code."""
    if status is None:
        return "has left its process in a state in which it does not end"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return "left its process without an answer: SIGKILL (out of memory or CPU time, or killed from outside)"
    if os.WIFSIGNALED(status):
        return f"ended its process: {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended its process with exit status {os.WEXITSTATUS(status)}"


class Printed:
    """The log of what an env's workers print; `name` is the env's."""

    def __init__(self, name: str):
        self.name = name
        self.lines = 0

    def take(self, said: bytes) -> None:
        for line in said.decode(errors="replace").splitlines():
            self.lines += 1
            if self.lines <= MAX_LOGGED:
                log.info("env %s printed: %s", self.name, line[:1000])
            elif self.lines == MAX_LOGGED + 1:
                log.info("env %s prints more than %d lines: the others are not logged", self.name, MAX_LOGGED)
