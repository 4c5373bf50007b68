"""Processes that run an env's code, seen from inside: a template, and the workers that are forked from it.

The template is forked once the env's tasks are loaded, while this is still the only thread. It runs no code of the env:
it forks workers when it is asked to, which takes milliseconds, ends them, and tells how they ended. It ends with its
parent. A worker carries out calls, in an event loop of its own; several at once where they wait for something.

What passes between the processes are frames of msgpack: numbers, texts, lists and mappings.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import gc
import logging
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, NoReturn

import msgspec

from prl.reaper import die_with_parent

MAX_FRAME = 64 << 20
"""[bytes] Largest frame that is read."""
NICE = 5
"""Added to the niceness of workers: model and trainer go first."""
ENDED = struct.Struct("!ii")
"""What the template says of a worker that has ended: its number and its wait status."""
ORDER = struct.Struct("!ci")
"""What the template is asked: to fork (`f`) worker number n, with its two files, or to kill (`k`) it."""
MAX_RESULT = 16 << 20
"""[bytes] Largest result of a call."""
MAX_MESSAGE = 2000
MAX_TRACEBACK = 8000

Handler = Callable[[Any], Awaitable[Any]]
"""Carries out a call: (its argument) -> its result, both as plain data."""


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


# --- frames -----------------------------------------------------------------------------------------------------------


def frame(message: dict[str, Any]) -> bytes:
    """Return a message as it is sent. Raises TypeError or ValueError for what is no plain data."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message; None at the end, or where what comes is none."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "big")
        message = msgspec.msgpack.decode(await reader.readexactly(length)) if length <= MAX_FRAME else None
    except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


# --- the template -----------------------------------------------------------------------------------------------------


def fork(child: Callable[[], None]) -> int:
    """Run `child` in a fork of this process, which ends with it; return the fork's id."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    pid = os.fork()
    if pid:
        return pid
    _run_child(child)


def _run_child(child: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        child()
        status = 0
    except BaseException:  # nothing of the process that was forked may run on here
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(status)


def leave_parent(keep: Iterable[int]) -> None:
    """Make a fork a process of its own: its session, its signals, and of its parent's files only `keep` and 0 to 2.

    The others stay open on nothing, so that no number is given out twice: objects of the parent may still close them.
    """
    parent = os.getppid()
    os.setsid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    nothing, kept = os.open(os.devnull, os.O_RDWR), {1, 2, *keep}
    for number in [int(name) for name in os.listdir("/dev/fd")]:
        if number not in kept and number != nothing:
            with contextlib.suppress(OSError):
                os.fstat(number)  # that of the listing itself is closed
                os.dup2(nothing, number)


def run_template(control: socket.socket, marks: Marks, handler: Handler, memory: int) -> None:
    """Fork a worker for each order that comes with a channel and an output, until `control` closes."""
    leave_parent({control.fileno()})
    _restore_streams()
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page of what was loaded
    workers: dict[int, int] = {}  # by process id, their numbers
    with contextlib.suppress(OSError):  # the other end is gone
        while True:
            ready, _, _ = select.select([control, woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
            if control in ready:
                order, files, _, _ = socket.recv_fds(control, ORDER.size, 2)
                if not order:
                    break
                kind, number = ORDER.unpack(order)
                if kind == b"f":
                    channel, output = files
                    pid = fork(lambda: run_worker(channel, output, number, marks, handler, memory))  # noqa: B023
                    workers[pid] = number
                    for file in files:
                        os.close(file)
                else:
                    _kill(pid for pid, each in workers.items() if each == number)
            while workers and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in workers:
                    _kill(ended[:1])  # what it has started
                    control.send(ENDED.pack(workers.pop(ended[0]), ended[1]))
    _kill(workers)


def _kill(groups: Iterable[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it may not lead its group yet
            if os.getpgid(group) != group:
                os.kill(group, signal.SIGKILL)


def _restore_streams() -> None:
    """Have Python's own output go to files 1 and 2, whatever the parent had put there, line by line."""
    sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115


# --- a worker ---------------------------------------------------------------------------------------------------------


def run_worker(channel: int, output: int, slot: int, marks: Marks, handler: Handler, memory: int) -> None:
    """Carry out the calls that come over `channel` until it closes."""
    leave_parent({channel, output})
    os.dup2(output, 1)
    os.dup2(output, 2)
    _restore_streams()
    logging.basicConfig(level=logging.INFO, force=True)
    os.nice(NICE)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator is seeded anew after a fork; this one is not
    _limit_memory(memory)
    calls = Calls(socket.socket(fileno=channel), slot, marks, handler)
    try:
        # Not `asyncio.run`: that would give all other tasks, cancelled, their say before the error is known.
        asyncio.new_event_loop().run_until_complete(calls.serve())
    except BaseException as error:  # of a task that the env's code started
        calls.last_words(error)


def _limit_memory(extra: int) -> None:
    """Let this process take `extra` bytes of address space more than it has."""
    try:
        with open("/proc/self/statm") as file:
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


class Calls:
    """The calls of a worker, each a task."""

    def __init__(self, channel: socket.socket, slot: int, marks: Marks, handler: Handler):
        self._channel = channel
        self._file = os.dup(channel.fileno())  # the loop closes its own
        self._slot = slot
        self._marks = marks
        self._handler = handler
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._new_task)
        while (message := await read_frame(reader)) is not None:
            number = message["call"]
            if "argument" not in message:
                if number in self._tasks:
                    self._tasks[number].cancel()
                continue
            context = contextvars.copy_context()
            context.run(CALL.set, number)
            self._tasks[number] = loop.create_task(self._answer(number, message["argument"]), context=context)

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **how: Any) -> "asyncio.Task[Any]":
        context = how.get("context")
        number = context[CALL] if context is not None and CALL in context else CALL.get()
        if not number:
            return asyncio.Task(coroutine, loop=loop, **how)
        first = number not in self._tasks
        marked = Marked(
            coroutine,
            lambda: self._marks.enter(self._slot, number),
            lambda: self._marks.leave(self._slot),
            (lambda: self._send({"call": number, "waits": True})) if first else None,
        )
        return asyncio.Task(marked, loop=loop, **how)

    async def _answer(self, number: int, argument: Any) -> None:
        try:
            reply = reply_of(number, await self._handler(argument))
        except BaseException as error:  # SystemExit and KeyboardInterrupt of env code are its failures
            reply = frame({"call": number, **described(error)})
        del self._tasks[number]
        self._writer.write(reply)

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(frame(message))

    def last_words(self, error: BaseException) -> None:
        """Answer the call whose code has ended the event loop."""
        with contextlib.suppress(OSError, ValueError):
            channel = socket.socket(fileno=self._file)
            channel.setblocking(True)
            channel.sendall(frame({"call": self._marks.read(self._slot)[0], **described(error)}))


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
        message = str(error)
        text = "".join(traceback.format_exception(error))
    except BaseException:
        message, text = "", ""
    plain = [str(part).encode("utf-8", "replace").decode() for part in (type(error).__name__, message, text)]
    return {"error": plain[0][:100], "message": plain[1][:MAX_MESSAGE], "traceback": plain[2][-MAX_TRACEBACK:]}
