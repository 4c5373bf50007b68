"""A process that runs an env's code: it carries out calls, several at once where they wait for something.

Its parent is the template (`template.py`), whose loaded tasks it has; calls come from the run (`workers.py`).
"""

import asyncio
import contextlib
import contextvars
import ctypes
import logging
import os
import resource
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Container, Coroutine, Generator, Iterable
from typing import Any

from prl.episodes.frames import Marks, frame, read_frame
from prl.episodes.isolation import escaped, said_by

NICE = 5
"""Added to the niceness of workers: model and trainer go first."""
MAX_RESULT = 16 << 20
"""[bytes] Largest result of a call."""
MAX_MESSAGE = 2000
MAX_TRACEBACK = 8000

Handler = Callable[[Any], Awaitable[Any]]
"""Carries out a call: (its argument) -> its result, both as plain data."""


def run_worker(channel: int, output: int, slot: int, marks: Marks, handler: Handler, memory: int) -> None:
    """Carry out the calls that come over `channel` until it closes."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    restore_streams()
    logging.basicConfig(level=logging.INFO, force=True)
    os.nice(NICE)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator is seeded anew after a fork; this one is not
    _limit_memory(memory)
    calls = Calls(socket.socket(fileno=channel), slot, marks, handler)
    try:
        # Not `asyncio.run`: that would give all other tasks, cancelled, their say before the error is known.
        loop = asyncio.new_event_loop()
        loop.set_task_factory(calls.new_task)
        loop.run_until_complete(calls.serve())
    except BaseException as error:  # of a task that the env's code started
        calls.last_words(error)


def _limit_memory(extra: int) -> None:
    """Let this process take `extra` bytes of address space more than it has."""
    try:
        with open("/proc/self/statm", encoding="utf-8") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: address spaces are not comparable
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + extra if most == resource.RLIM_INFINITY else min(taken + extra, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Arenas of further threads reserve address space that nobody uses.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX


def restore_streams() -> None:
    """Have Python's own output go to files 1 and 2, whatever the parent had put there, line by line."""
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


CALL: contextvars.ContextVar[int] = contextvars.ContextVar("prl_call", default=0)
"""Number of the call that the current code belongs to; 0 for none."""


class Marked(Coroutine[Any, Any, Any]):
    """A coroutine that marks its call while it runs; `when_it_waits` is told once, the first time that it awaits."""

    def __init__(
        self,
        coroutine: Any,
        mark: Callable[[], None],
        unmark: Callable[[], None],
        when_it_waits: Callable[[], None] | None,
    ):
        self._coroutine = coroutine
        self._mark, self._unmark = mark, unmark
        self._when_it_waits = when_it_waits

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def _step(self, step: Callable[..., Any], *values: Any) -> Any:
        self._mark()
        try:
            result = step(*values)
        except (SystemExit, KeyboardInterrupt):  # it ends the loop, and the mark says whose it was
            raise
        except BaseException:
            self._unmark()
            raise
        self._unmark()
        if self._when_it_waits is not None:
            self._when_it_waits()
            self._when_it_waits = None
        return result

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("only a task runs it")


class CallTask(asyncio.Task[Any]):
    """A task of call `number`, 0 for none, which no other call can cancel while `number` is among the `begun` ones."""

    def __init__(self, coroutine: Any, number: int, begun: Container[int], **how: Any):
        self._number, self._begun = number, begun
        super().__init__(coroutine, **how)

    def cancel(self, msg: Any | None = None) -> bool:
        theirs = CALL.get() not in (0, self._number) and (not self._number or self._number in self._begun)
        return not theirs and super().cancel(msg)


class Calls:
    """The calls of a worker, each a task."""

    def __init__(self, channel: socket.socket, slot: int, marks: Marks, handler: Handler):
        self._channel = channel
        self._file = os.dup(channel.fileno())  # the loop closes its own
        self._slot = slot
        self._marks = marks
        self._handler = handler
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._process = os.getpid()

    async def serve(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        loop = asyncio.get_running_loop()
        own, nothing = (self._channel.fileno(), self._file), os.open(os.devnull, os.O_RDWR)
        os.register_at_fork(after_in_child=lambda: self._disown(own, nothing, loop))
        while (message := await read_frame(reader)) is not None:
            number = message["call"]
            if "argument" not in message:
                if number in self._tasks:
                    self._tasks[number].cancel()
                continue
            context = contextvars.copy_context()
            context.run(CALL.set, number)
            self._tasks[number] = loop.create_task(self._answer(number, message["argument"]), context=context)

    def new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **how: Any) -> "asyncio.Task[Any]":
        context = how.get("context")
        number = context[CALL] if context is not None and CALL in context else CALL.get()
        if not number:
            return CallTask(coroutine, 0, self._tasks, loop=loop, **how)
        first = number not in self._tasks
        marked = Marked(
            coroutine,
            lambda: self._mark(number),
            self._unmark,
            (lambda: self._send({"call": number, "waits": True})) if first else None,
        )
        return CallTask(marked, number, self._tasks, loop=loop, **how)

    def _mark(self, number: int) -> None:
        self._end_if_forked()
        self._marks.enter(self._slot, number)

    def _unmark(self) -> None:
        self._end_if_forked()
        self._marks.leave(self._slot)

    async def _answer(self, number: int, argument: Any) -> None:
        try:
            reply = reply_of(number, await self._handler(argument))
        except BaseException as error:  # SystemExit and KeyboardInterrupt of env code are its failures
            reply = frame({"call": number, **described(error if isinstance(error, Exception) else escaped(error))})
        self._end_if_forked()
        del self._tasks[number]
        self._writer.write(reply)

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(frame(message))

    @staticmethod
    def _disown(own: Iterable[int], nothing: int, loop: asyncio.AbstractEventLoop) -> None:
        """In a child that the env's code forks, leave the channel to the worker; its loop does no more than end it."""
        with contextlib.suppress(OSError):  # the code has closed them
            for file in own:
                os.dup2(nothing, file, inheritable=False)
        loop.call_soon(os._exit, 1)

    def _end_if_forked(self) -> None:
        """End a child that the env's code has forked where it comes back from that code: it is not the worker."""
        if os.getpid() != self._process:
            with contextlib.suppress(OSError):
                os.write(2, b"a process that the env's code forked was ended where it came back: end it by os._exit\n")
            os._exit(1)

    def last_words(self, error: BaseException) -> None:
        """Answer the call whose code has ended the event loop, if it is known."""
        self._end_if_forked()
        number = self._marks.read(self._slot)[0] or (next(iter(self._tasks)) if len(self._tasks) == 1 else 0)
        self._marks.enter(self._slot, number)
        with contextlib.suppress(OSError, ValueError):
            channel = socket.socket(fileno=self._file)
            channel.setblocking(True)
            channel.sendall(frame({"call": number, **described(escaped(error))}))


def reply_of(number: int, result: Any) -> bytes:
    """Return the frame of a result. Raises ValueError for one that cannot be sent."""
    try:
        reply = frame({"call": number, "result": result})
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"what it recorded is no plain data: {error}") from error
    if len(reply) > MAX_RESULT:
        raise ValueError(f"what it recorded has {len(reply) >> 20} MiB, more than {MAX_RESULT >> 20}")
    return reply


def described(error: BaseException) -> dict[str, Any]:
    """Return an exception as plain data; what its own `__str__` raises does not matter."""
    try:
        text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    except BaseException:
        text = ""
    parts = {"error": type(error).__name__[:100], "message": said_by(error, MAX_MESSAGE), "traceback": text}
    return {name: part.encode("utf-8", "replace").decode() for name, part in parts.items()}
