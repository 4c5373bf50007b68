"""Say which code an event loop stands still in, hear signals meanwhile, and interrupt the user's code in it.

One thread a loop. It says so on the terminal after ten seconds. Code of an env and hooks of components have a deadline,
which a signal that stops the run (`prl.signals`) brings near. Python code is interrupted there, and so is what it waits
in (`sleep`, a lock): `StoodStill` is raised in it. Code that does not end then ends with the process.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from types import FrameType
from typing import Any

from prl.errors import StoodStill
from prl.text import as_message

log = logging.getLogger(__name__)

STILL_S = 1.0
"""[s] Standing still for longer is said in the log."""
QUIET_S = 10.0
"""[s] For longer, on the terminal; each next time after twice as long."""
STOP_S = 2.0
"""[s] Time for code that holds the loop up to return once a signal has come."""
GRACE_S = 5.0
"""[s] Time for code to stop once it has been interrupted, before the process is ended."""
BEAT_S = 0.2
SIGNAL, TIMER = signal.SIGVTALRM, signal.ITIMER_VIRTUAL
"""Has the loop's thread look whether to interrupt what it is in. The timer sends it, which each turn of the loop sets
anew: C code that computes may hear signals, and yet keep the interpreter from other threads."""
DEAF_S = 300.0
"""[s] CPU time in which the watching thread has had no turn: then the kernel ends the process (SIGPROF)."""


@dataclass
class Standstill:
    """The time since the loop turned last; most are over at once."""

    beat: float
    """When it turned last, seconds."""
    lasted_s: float = 0.0
    """While this process ran: less than has passed where it was stopped."""
    next_s: float = 0.0
    """When to say next that it lasts, on the terminal."""
    place: tuple[str | None, str] | None = None
    """The env and the function that it was noticed in; None = not noticed so far."""
    signal_s: float = math.inf
    """When a signal came that stops the run."""
    interrupted_s: float = -math.inf
    """When it was interrupted last."""


@dataclass
class Held:
    """Code that holds a loop up, and may be interrupted."""

    where: str
    """Its config key."""
    env: str | None
    """The env that it is of; None = it is a component's hook, and the run's."""
    frame: FrameType
    """The innermost of that code."""
    limit_s: float


class LoopMonitor:
    """A thread that watches `loop`, of the current thread; it is told of each standstill once for each place."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.modules: dict[str, tuple[str, float]] = {}
        """Modules of env code: the envs that they are of, and how long these may hold the loop up, in seconds."""
        self.hooks: dict[int, tuple[str, float]] = {}
        """By the id of a component that lives as long as this: its config key, and how long a method may hold it up."""
        self.leave: Callable[[str, str], None] = lambda status, error: None
        """Gets status and error of a run whose process is about to be ended, to keep them."""
        self.standstills: Counter[tuple[str | None, str]] = Counter()
        """How often it stood still, by env and function."""
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._in_main = threading.current_thread() is threading.main_thread()  # only that one gets signals
        self._numbers = set[int]()
        self._stop: Callable[[int], Any] = lambda number: None
        self._due: tuple[float, str] | None = None
        """The beat after which to interrupt what the loop stands in, and what to say there."""
        self._beat = time.monotonic()
        self._ended = threading.Event()
        self._handle: asyncio.TimerHandle | None = None
        self._ear, self._mouth = socket.socketpair()
        self._ear.settimeout(BEAT_S)
        self._mouth.setblocking(False)
        self._before = signal.signal(SIGNAL, self._stop_here) if self._in_main else None
        self._wakeup: int | None = None
        self._live()
        self._thread = threading.Thread(target=self._watch, name="prl-loop-monitor", daemon=True)
        self._thread.start()

    def hear(self, numbers: Sequence[signal.Signals], stop: Callable[[int], Any]) -> None:
        """Call `stop` in the loop at each of these signals, whose handlers are the caller's to set and put back.

        The kernel's call, not Python's, tells the thread: it hears them whatever the loop is in. Where the loop's
        thread gets no signals there are no `numbers`: `tell` says them.
        """
        self._stop, self._numbers = stop, {signal.SIGINT, *numbers}
        if not numbers:
            return
        self._wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        faulthandler.register(signal.SIGPROF, 2, all_threads=False, chain=True)  # says where, and ends it
        signal.setitimer(signal.ITIMER_PROF, DEAF_S)

    def tell(self, number: int = signal.SIGINT, by: int = -1) -> None:
        """Have the thread hear of a signal, unless the kernel's call went to it: to the file `by`."""
        if by != self._mouth.fileno():
            self._mouth.send(bytes([number]))

    def close(self) -> None:
        self._ended.set()
        if self._handle is not None:
            self._handle.cancel()
        with contextlib.suppress(BlockingIOError):
            self._mouth.send(b"\0")  # of no signal: the thread need not wait for its beat to end
        self._thread.join(1.0)
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.unregister(signal.SIGPROF)
        if self._before is not None:
            signal.setitimer(TIMER, 0)
            signal.signal(SIGNAL, self._before)
        self._ear.close()
        self._mouth.close()

    def _live(self) -> None:
        self._beat = time.monotonic()
        if self._in_main:
            signal.setitimer(TIMER, STILL_S, STILL_S)
        self._handle = self._loop.call_later(BEAT_S, self._live)

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})  # it is to tell where the loop's thread is
        found, first, looked, used = Standstill(self._beat, next_s=QUIET_S), True, time.monotonic(), time.process_time()
        while not self._ended.is_set():
            if self._wakeup is not None:
                signal.setitimer(signal.ITIMER_PROF, DEAF_S)
            numbers = self._heard()
            now, cpu_s = time.monotonic(), time.process_time()
            # A stopped process counts as one look; one that computes may have kept this thread from looking.
            passed_s = min(now - looked, max(2 * BEAT_S, cpu_s - used))
            looked, used = now, cpu_s
            if self._beat != found.beat:
                self._tell_end(found)
                found = Standstill(self._beat, next_s=QUIET_S)
            found.lasted_s += passed_s
            for number in self._numbers.intersection(numbers):
                if first or number == signal.SIGINT:  # others come several times (`prl.signals.once_by_term`)
                    found.signal_s, first = min(found.signal_s, found.lasted_s), False
                self._loop.call_soon_threadsafe(self._stop, number)
            if found.lasted_s > STILL_S + BEAT_S:
                self._look(found)

    def _heard(self) -> bytes:
        """The numbers of the signals that come within a beat."""
        with contextlib.suppress(TimeoutError):
            return self._ear.recv(256)
        return b""

    def _look(self, found: Standstill) -> None:
        held = self._held(sys._current_frames().get(self._thread_id))
        if found.place is None:
            found.place = self._place(held)
            self.standstills[found.place] += 1
            if self.standstills[found.place] == 1:
                self._tell(*found.place)
        if found.lasted_s >= found.next_s:
            self._say(found, held)
            found.next_s *= 2
        if held is None:
            return
        over_s = found.lasted_s - min(held.limit_s, found.signal_s + STOP_S)
        if over_s > GRACE_S and self._wakeup is not None:
            self._end_process(found, held)
        elif over_s > 0 and found.lasted_s - found.interrupted_s > STILL_S:
            found.interrupted_s = found.lasted_s
            self._interrupt(found, held)

    def _tell(self, env: str | None, function: str) -> None:
        """Say where the loop stands: a warning where it is an env's code; else the machine may be busy."""
        said = f"the event loop has stood still for more than {STILL_S:g} s in {function}"
        if env is None:
            return log.info(said)
        elsewhere = f"envs.{env}.in_process=false gives graders a process of their own"
        log.warning("env %s: %s: until that returns nothing of the run goes on (%s)", env, said, elsewhere)

    def _say(self, found: Standstill, held: Held | None) -> None:
        """Say on the terminal what the run waits for."""
        said = f"the event loop stands still in {self._place(None)[1]}"
        if held is not None:
            said = f"{held.where}: the run waits for {_described(held.frame)}, which holds up its event loop "
            said += f"(interrupted after {held.limit_s:g} s)"
        starts = held is not None and held.frame.f_code.co_name == "start"  # of a monitor: no progress to miss
        log.warning(f"{'starting, nothing new' if starts else 'no progress'} for {found.lasted_s:.0f} s: {said}")

    def _tell_end(self, found: Standstill) -> None:
        if found.place is not None:
            level = logging.WARNING if found.next_s > QUIET_S else logging.INFO
            log.log(level, "the event loop stood still for %.1f s in %s", found.lasted_s - BEAT_S, found.place[1])

    def _interrupt(self, found: Standstill, held: Held) -> None:
        """Raise StoodStill in the code, soon; in a thread that gets no signals, once it runs Python code."""
        log.warning("interrupting %s, which holds up the event loop", _described(held.frame))
        said = "a signal came that stops the run"
        if found.lasted_s > held.limit_s and held.env is None:
            said = f"it did not return to the event loop for {held.limit_s:g} s"
        elif found.lasted_s > held.limit_s:
            said = "the env's code did not return to the event loop before the deadline of its rollout"
        self._due = found.beat, f"{said}, at {_described(held.frame)}"
        if self._in_main:
            signal.pthread_kill(self._thread_id, SIGNAL)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), ctypes.py_object(StoodStill))

    def _stop_here(self, _: int, frame: FrameType | None) -> None:
        """Interrupt what the loop's thread is in, if it still is what was to be: the handler of `SIGNAL`."""
        due = self._due
        if due is not None and due[0] == self._beat and self._held(frame) is not None:
            raise StoodStill(due[1])
        if time.monotonic() - self._beat > STILL_S:
            time.sleep(0.01)  # the thread that watches has its turn

    def _end_process(self, found: Standstill, held: Held) -> None:
        """End the process, whose loop's thread hears nothing: its children end as they do when it is killed."""
        held_up = f"{_described(held.frame)} held up the event loop for {found.lasted_s:.0f} s"
        said = f"{held.where}: {held_up} and did not stop when it was interrupted"
        stopped = found.lasted_s <= held.limit_s + GRACE_S
        with contextlib.suppress(Exception):
            self.leave("stopped" if stopped else "failed", said)
        os.write(2, f"error: {as_message(said)}\n".encode(errors="replace"))  # the stream may be locked
        os._exit(128 + signal.SIGINT if stopped else 1)

    def _held(self, frame: FrameType | None) -> Held | None:
        """The code to be interrupted that a stack is in, by its innermost frame; None where there is none."""
        while frame is not None:
            if (of_env := self.modules.get(frame.f_globals.get("__name__", ""))) is not None:
                return Held(f"envs.{of_env[0]}", of_env[0], frame, of_env[1])
            code = frame.f_code
            own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if (of_hook := self.hooks.get(id(own))) is not None:
                return Held(of_hook[0], None, frame, of_hook[1])
            frame = frame.f_back
        return None

    def _place(self, held: Held | None) -> tuple[str | None, str]:
        """Return the env and the function in which the loop stands: of code of the user's if there is any."""
        frame = sys._current_frames().get(self._thread_id) if held is None else held.frame
        return (None if held is None else held.env), "an unknown place" if frame is None else _described(frame)


def _described(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename}, line {frame.f_lineno})"


_monitors: dict[asyncio.AbstractEventLoop, tuple[LoopMonitor, list[str]]] = {}
"""The monitor of each event loop, and who has it: envs, and the run."""


@contextlib.contextmanager
def watching(name: str, modules: Set[str] = frozenset(), limit_s: float = math.inf) -> Iterator[LoopMonitor]:
    """Watch the running event loop while the block lasts, for the env `name`; `modules` hold the env's code.

    Code of theirs that holds it up for `limit_s` is interrupted.
    """
    loop = asyncio.get_running_loop()
    if loop not in _monitors:
        _monitors[loop] = (LoopMonitor(loop), [])
    monitor, names = _monitors[loop]
    names.append(name)
    monitor.modules |= dict.fromkeys(modules, (name, limit_s))
    try:
        yield monitor
    finally:
        names.remove(name)
        if not names:
            del _monitors[loop]
            monitor.close()
