"""Say which code the event loop stands still in, and interrupt it: env code that runs in it must be quick.

Python code can be interrupted; a C function that does not return cannot.
"""

import asyncio
import contextlib
import ctypes
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import FrameType

log = logging.getLogger(__name__)

STILL_S = 1.0
"""[s] Standing still for longer is said."""
BEAT_S = 0.2


class StoodStill(RuntimeError):
    """Raised in env code that holds the event loop up for longer than a rollout may take."""

    def __str__(self) -> str:
        return "the env's code did not return to the event loop before the deadline of its rollout"


class LoopMonitor:
    """A thread that watches one event loop; it is told of each standstill once for each place.

    Args:
        loop: The event loop, of the current thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.modules: dict[str, tuple[str, float]] = {}
        """Modules of env code: the envs that they are of, and how long these may hold the loop up, in seconds."""
        self.standstills: Counter[tuple[str | None, str]] = Counter()
        """How often it stood still, by env and function."""
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._beat = time.monotonic()
        self._ended = threading.Event()
        self._handle: asyncio.TimerHandle | None = None
        self._live()
        self._thread = threading.Thread(target=self._watch, name="prl-loop-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._handle is not None:
            self._handle.cancel()
        self._thread.join(1.0)

    def _live(self) -> None:
        self._beat = time.monotonic()
        self._handle = self._loop.call_later(BEAT_S, self._live)

    def _watch(self) -> None:
        told: float | None = None
        """The beat after which a standstill was told; None while there is none."""
        place: tuple[str | None, str] = (None, "")
        interrupted = 0.0
        while not self._ended.wait(BEAT_S):
            beat = self._beat
            if told is not None and beat != told:
                log.info("the event loop stood still for %.1f s in %s", beat - told - BEAT_S, place[1])
                told = None
            if told is not None and time.monotonic() - max(beat, interrupted) > STILL_S and self._interrupt(beat):
                interrupted = time.monotonic()
            if told is None and time.monotonic() - beat > STILL_S + BEAT_S:
                told, place = beat, self._place()
                self.standstills[place] += 1
                if self.standstills[place] == 1:
                    self._tell(*place)

    def _tell(self, env: str | None, function: str) -> None:
        """Say where the loop stands: a warning where it is an env's code; else the machine may be busy."""
        if env is None:
            log.info("the event loop has stood still for more than %g s in %s", STILL_S, function)
            return
        log.warning(
            "env %s: the event loop has stood still for more than %g s in %s: until that returns nothing of the run "
            "goes on, and no signal is answered (envs.%s.in_process=false gives graders a process of their own)",
            env,
            STILL_S,
            function,
            env,
        )

    def _interrupt(self, beat: float) -> bool:
        """Raise StoodStill in env code that has stood still since `beat`, for longer than its rollouts may take."""
        _, frame, limit_s = self._standing()
        if frame is None or time.monotonic() - beat <= limit_s:
            return False
        log.warning("interrupting %s, which holds up the event loop", _described(frame))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), ctypes.py_object(StoodStill))
        return True

    def _standing(self) -> tuple[str | None, FrameType | None, float]:
        """Return the env whose code the loop stands in, the innermost frame of that code, and the env's limit."""
        frame = sys._current_frames().get(self._thread_id)
        while frame is not None:
            if (found := self.modules.get(frame.f_globals.get("__name__", ""))) is not None:
                return found[0], frame, found[1]
            frame = frame.f_back
        return None, None, math.inf

    def _place(self) -> tuple[str | None, str]:
        """Return the env and the function in which the loop stands: of an env's own code if there is any."""
        env, frame, _ = self._standing()
        frame = frame or sys._current_frames().get(self._thread_id)
        return env, "an unknown place" if frame is None else _described(frame)


def _described(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename}, line {frame.f_lineno})"


_monitors: dict[asyncio.AbstractEventLoop, tuple[LoopMonitor, list[str]]] = {}
"""The monitor of each event loop, and the envs that have it."""


@contextlib.contextmanager
def watching(env: str, modules: set[str], limit_s: float) -> Iterator[LoopMonitor]:
    """Watch the running event loop while the block lasts; `modules` hold the env's code.

    Code of theirs that holds it up for `limit_s` is interrupted.
    """
    loop = asyncio.get_running_loop()
    if loop not in _monitors:
        _monitors[loop] = (LoopMonitor(loop), [])
    monitor, envs = _monitors[loop]
    envs.append(env)
    monitor.modules |= dict.fromkeys(modules, (env, limit_s))
    try:
        yield monitor
    finally:
        envs.remove(env)
        if not envs:
            del _monitors[loop]
            monitor.close()
