"""Code of the user's: whatever it raises is a refusal before a run, and ends the run by its name during one (`called`).

Before a run it has a deadline: the import of what a config names, what is made of it, and the `load` of an env's tasks.
Python code is interrupted at the deadline. Code that cannot be (a C function that does not return, an `except` that
takes everything) ends with this process: a watcher, forked for the time being, says so and kills it.
"""

import contextlib
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from prl.errors import ConfigError, PrlError, of_own_code
from prl.reaper import fork
from prl.signals import stopping
from prl.text import as_message

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""[s] Time for code to stop once it has been interrupted, before the process is killed."""
LIMIT_S = 300.0
"""[s] Deadline of code that has none of its own."""
SPARED = 0.9
"""Share of the memory that is left which it may take."""
OWN = ("prl.", "torch.optim.")
"""Beginnings of the paths of code that is not the user's."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP came while the user's code ran: not an exception of that code."""


class Late(BaseException):
    """The deadline has passed. No Exception: code handles those."""


@contextlib.contextmanager
def contained(where: str, what: str, path: str) -> Iterator[None]:
    """Run the block, which is code that a config names, in time; what it raises is a refusal.

    Args:
        where: The config key, for messages.
        what: What the block does, for messages: `importing it`.
        path: The dotted path of the code. prl's own has no deadline, and of its exceptions those that are none of
            Exception pass.

    Raises:
        ConfigError: The deadline has passed, or the code has raised something.
        Interrupted: A signal of `stopping` came.
    """
    own = path.startswith(OWN)
    failures = Exception if own else BaseException
    with contextlib.nullcontext() if own else in_time(LIMIT_S, where, what):
        try:
            yield
        except PrlError:
            raise
        except failures as error:
            raise failed(error, where, what) from error


def hook(where: str, component: object, name: str) -> contextlib.AbstractContextManager[None]:
    """`contained`, for a block that calls the method `name` of a component."""
    return contained(where, f"{type(component).__name__}.{name}", type(component).__module__)


class called:
    """Run the block, which calls a component (its method `name`) during a run; `where` is its config key, for messages.

    SystemExit and KeyboardInterrupt are the component's own here, and would tear the event loop: Ctrl-C comes as a
    cancellation of what is awaited (`prl.signals`). Not for a block that awaits.

    A class: rollouts go through it by the thousand, and a generator takes three times as long.

    Raises:
        PrlError: Whatever it raised, with file and line.
    """

    __slots__ = ("component", "name", "where")

    def __init__(self, where: str, component: object, name: str = ""):
        self.where, self.component, self.name = where, component, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, PrlError):
            return
        what = type(self.component).__name__ + f".{self.name}" * bool(self.name)
        log.info("%s: %s failed", self.where, what, exc_info=True)
        raise PrlError(f"{self.where}: {what} failed: {of_own_code(error)}") from error


def failed(error: BaseException, where: str, what: str) -> ConfigError:
    """Return the refusal for an exception of the user's code, with `where` it is configured.

    Raises what is not of that code: that it was interrupted, or is late.
    """
    if isinstance(error, Interrupted | Late):
        raise error
    return ConfigError(f"{where}: {what} failed: {of_own_code(error)}")


@contextlib.contextmanager
def in_time(limit_s: float, where: str, what: str, *, watched: bool = True) -> Iterator[None]:
    """Run the block, which is the user's code, for at most `limit_s`; the signals of `stopping` interrupt it as well.

    Args:
        limit_s: [s] The deadline.
        where: The config key of the code or of the deadline, for messages.
        what: What the block does, for messages: `loading the tasks of …`.
        watched: Kill this process if the block cannot be interrupted.

    Raises:
        ConfigError: The deadline has passed, or it takes more memory than there is.
        Interrupted: One of them came.
    """
    if threading.current_thread() is not threading.main_thread():  # only the first thread gets signals
        yield
        return
    with _within_memory(where, what):
        yield from _in_time(limit_s, where, what, watched=watched)


@contextlib.contextmanager
def _within_memory(where: str, what: str) -> Iterator[None]:
    """Have a block that takes more memory than this machine has left get a MemoryError, where the kernel would kill it.

    Linux only, which counts what can be written to; what is only reserved, as by CUDA, is not counted.
    """
    try:
        taken = _kib("/proc/self/status", "VmData:")
        left = _kib("/proc/meminfo", "MemAvailable:")
        before = resource.getrlimit(resource.RLIMIT_DATA)
    except (OSError, StopIteration):
        yield
        return
    limits = [limit for limit in (*before, 1024 * int(taken + SPARED * left)) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        yield
    except MemoryError as error:
        raise ConfigError(f"{where}: {what} takes more memory than this machine has left") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _kib(file: str, name: str) -> int:
    with open(file, encoding="utf-8") as lines:
        return int(next(line for line in lines if line.startswith(name)).split()[1])


def _in_time(limit_s: float, where: str, what: str, *, watched: bool) -> Iterator[None]:
    """`in_time` in the main thread."""
    readable, held = os.pipe()
    parent = os.getpid()
    watcher = fork(lambda: _watch(readable, held, parent, limit_s, where, what)) if watched else None
    handlers = {signal.SIGALRM: _late} | dict.fromkeys(stopping(), _interrupted)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    started, timer = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, 0.5)  # it may be over at once
        yield
    except Late as error:
        frame = traceback.extract_tb(error.__traceback__)[-2]  # the last is that of the signal's handler
        raise ConfigError(
            f"{where}: {what} had not ended after {limit_s:g} s; it was at {frame.filename}, line {frame.lineno}"
        ) from error
    finally:
        if os.getpid() != parent:  # the code has forked: its child is no run
            os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        if timer[0]:  # somebody else's goes on
            signal.setitimer(signal.ITIMER_REAL, max(0.001, timer[0] - (time.monotonic() - started)), timer[1])
        if watcher is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(watcher, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # the code has waited for it, or ignores SIGCHLD
                os.waitpid(watcher, 0)
        for end in (readable, held):
            with contextlib.suppress(OSError):  # the code has closed it
                os.close(end)


def _late(_: int, __: FrameType | None) -> NoReturn:
    raise Late


def _interrupted(_: int, __: FrameType | None) -> NoReturn:
    raise Interrupted


def _watch(readable: int, held: int, parent: int, limit_s: float, where: str, what: str) -> None:
    """Kill `parent` when it does not stop; say so, also where it has ended without a word. It ends this, else."""
    os.close(held)
    pressed: list[float] = []
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    for number in stopping():
        signal.signal(number, lambda *_: pressed.append(time.monotonic()))
    deadline = time.monotonic() + limit_s + GRACE_S
    said = f"{where}: {what} ended the process"
    while not select.select([readable], [], [], 0.2)[0]:
        if pressed and time.monotonic() > pressed[0] + GRACE_S:
            said = f"{where}: {what} did not stop when it was interrupted"
        elif time.monotonic() > deadline:
            said = f"{where}: {what} had not ended after {limit_s:g} s, and cannot be interrupted"
        else:
            continue
        os.kill(parent, signal.SIGKILL)
        break
    print(f"error: {as_message(said)}", file=sys.stderr, flush=True)
