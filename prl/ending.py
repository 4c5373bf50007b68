"""The end of a command: threads and processes that the user's code has left do not keep it, nor outlive it."""

import atexit
import contextlib
import ctypes
import gc
import io
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from prl import reaper, scratch
from prl.signals import stopping
from prl.text import safe

MOMENT_S = 2.0
"""[s] Time for what is left to end by itself."""
ATEXIT_S = 10.0
"""[s] Time for what is registered with `atexit`, which may be the user's."""
OURS = (reaper.__file__, scratch.__file__)
"""Programs that end what is below them, and themselves, once their launcher has gone."""
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "loky.backend.resource_tracker")
"""Modules in the command lines of processes that clear up once this one has gone."""
LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """End the process soon after the block, which is a whole command, and with the status of it.

    Python would wait for threads that are no daemons, and for children of `multiprocessing`. What `atexit` knows of
    later than this has its turn before processes are looked for: wandb, joblib and others end their own there. Where
    nothing is left, and Python has no error to say, the process goes without taking its modules apart, which takes a
    second and, beside threads of gloo's that let go of tensors, may abort.
    """
    atexit.register(_end_processes, os.getpid())
    status, asked = 1, None
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):  # Python says it
            raise
        asked = end
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        raise
    finally:
        for number in stopping():  # the command has its status, and the end its deadlines
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_watch, args=[status], name="prl-ending", daemon=True).start()
    if not _left_threads() and sys.gettrace() is sys.getprofile() is None:  # a profiler has yet to write
        atexit._run_exitfuncs()
        _flush()
        os._exit(status)
    if asked is not None:
        raise asked


def _flush() -> None:
    """Write what open files still hold in memory, those too that nobody has closed: Python does at its own end."""
    gc.unfreeze()  # else they may be among what is not looked through
    found = [each for each in gc.get_objects() if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter)]
    for file in sorted(found, key=lambda each: not issubclass(type(each), io.TextIOWrapper)):  # texts write to the rest
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    ctypes.CDLL(None).fflush(None)  # of libraries written in C


def _watch(status: int) -> None:
    """End what Python waits for: children, so that it goes on, or else this process."""
    time.sleep(MOMENT_S)
    while not (threads := _left_threads()):
        _end([], [child.pid for child in multiprocessing.active_children() if child.pid is not None])
        time.sleep(0.1)
    _end(threads, _left_processes())
    last = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    last.start()
    last.join(ATEXIT_S)
    _flush()
    os._exit(status)


def _end_processes(pid: int) -> None:
    """End the processes that are left below this one, `pid`, if they do not end by themselves. Not for its forks."""
    deadline = time.monotonic() + MOMENT_S
    while os.getpid() == pid and (left := _left_processes()):
        if time.monotonic() > deadline:
            return _end([], left)
        time.sleep(0.02)


def _end(threads: Iterable[threading.Thread], processes: Collection[int]) -> None:
    """Say what is left, if anything is, and kill the processes and all below them."""
    said = [_described(thread) for thread in threads] + [
        f"process {pid} ({reaper.command_of(pid)})" for pid in processes
    ]
    if said:
        print(f"still running at the end, and ended: {safe(', '.join(said))}", file=sys.stderr, flush=True)
    for pid in set(processes).union(*map(reaper.descendants, processes)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _left_threads() -> list[threading.Thread]:
    """The threads that Python waits for."""
    return [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]


def _described(thread: threading.Thread) -> str:
    """The name of a thread, and where in the user's code it is."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith((*LIBRARIES, "<")):
        frame = frame.f_back
    return f"thread {thread.name}" + (f" at {frame.f_code.co_filename}, line {frame.f_lineno}" if frame else "")


def _left_processes() -> list[int]:
    """The processes below this one that are none of prl's, and clear up nothing."""
    above, found, frontier = reaper.parents(), list[int](), {os.getpid()}
    while frontier:
        below = sorted(pid for pid, parent in above.items() if parent in frontier and pid not in reaper.forked)
        words = {pid: _command_line(pid) for pid in below}
        frontier = {pid for pid in below if not any(program in words[pid] for program in OURS)}
        found += [pid for pid in sorted(frontier) if not any(name in words[pid] for name in HELPERS)]
    return found


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""
