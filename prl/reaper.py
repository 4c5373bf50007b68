"""Parent of one process of a run: ends all that descends from it when the launcher goes away, however it goes.

    python -S -P reaper.py COMMAND [ARG …]        with a pipe from the launcher as standard input

The reaper leads a session and group of its own, adopts every descendant whose own parent has ended, and asks its group
to end when the pipe closes, which the kernel does even for a launcher killed with SIGKILL; after `GRACE_S` it kills all
descendants. A byte in the pipe has it kill them at once. When the command ends first, the reaper kills what the command
has left and ends with its status. What a killed reaper leaves is ended by the kernel (`tie`) and by the keeper
(`scratch.py`). Standard library only; it starts in milliseconds.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

GRACE_S = 5.0
forked = set[int]()
"""The forks of this process that `fork` has made."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Ask Linux for something about this process; nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent is gone, however it went. Linux only: nothing elsewhere."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stat(pid: int) -> list[str]:
    """What /proc says of a process that has not ended, from its state on (proc(5), field 3); empty for any other."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()  # its name may be no text
    except OSError:
        return []
    return fields if fields[0] not in "ZX" else []


def command_of(pid: int) -> str:
    """What a process runs, in a word or two: a module, or a title that it gave itself."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").strip("\0").split("\0")
        return words[words.index("-m") + 1] if "-m" in words[:-1] else Path(words[0].strip()).name
    return "?"


def parents() -> dict[int, int]:
    """The parent of every process of this machine that has not ended. Empty where there is no /proc."""
    found = {int(path.name): stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    return {pid: int(fields[1]) for pid, fields in found.items() if fields}


def descendants(pid: int) -> set[int]:
    """The processes below `pid` that have not ended."""
    above, found, frontier = parents(), set[int](), {pid}
    while frontier:
        frontier = {child for child, parent in above.items() if parent in frontier} - found
        found |= frontier
    return found


def fork(child: Callable[[], None]) -> int:
    """Run `child` in a fork of this process, which ends with it; return the fork's id."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    pid = os.fork()
    if pid:
        forked.add(pid)
        return pid
    forked.clear()
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


class Reaper:
    """The command's parent."""

    def __init__(self, command: list[str]):
        # A handler, not SIG_IGN: the child would inherit being deaf, while a handler is reset for it.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.heard = [0]
        with contextlib.suppress(AttributeError, OSError):  # tells also where a child of the launcher holds the pipe
            self.heard.append(os.pidfd_open(os.getppid()))
        self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)

    def run(self) -> int:
        """Run the command until it ends or the launcher wants it to. Returns its status."""
        while self.running():
            if ready := select.select(self.heard, [], [], 0.05)[0]:
                self.end(at_once=ready == [0] and os.read(0, 1) != b"")
        self.kill()
        return self.child.returncode if self.child.returncode >= 0 else 128 - self.child.returncode

    def running(self) -> bool:
        """Whether the command runs. Clears away adopted processes that have ended."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid == self.child.pid:
                    break
                os.waitpid(ended.si_pid, 0)
        return self.child.poll() is None

    def end(self, *, at_once: bool) -> None:
        """Ask the command's group to end and kill what is left after the time of grace."""
        if not at_once:
            for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped hears nothing else
                os.killpg(0, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(GRACE_S)
        self.kill()
        os.killpg(0, signal.SIGKILL)  # this process included

    def kill(self) -> None:
        """Kill every descendant."""
        deadline = time.monotonic() + GRACE_S
        while (left := descendants(os.getpid())) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.running()
            time.sleep(0.01)


def tie() -> None:
    """Tie this process and those that it forks to their parents, and have it say how a process it started was killed.

    For a module that Python runs or that `multiprocessing` imports again in the processes it spawns.
    """
    from multiprocessing import popen_fork

    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    poll, launch, signal_to = popen_fork.Popen.poll, popen_fork.Popen.__init__, popen_fork.Popen._send_signal  # type: ignore[attr-defined]

    def named(self: Any, process: Any) -> None:
        self.name, self.ended_by_us = process.name, False
        launch(self, process)

    def noting(self: Any, number: int) -> None:
        # One that was killed before is said to be. Its pipe closes, which has the server end it, before its status is
        # there: with a limit above 0 `wait` then waits for that, and for nothing else.
        if self.wait(1e-9) is None:
            self.ended_by_us = True
        signal_to(self, number)

    def telling(self: Any, flag: int = os.WNOHANG) -> int | None:
        before, status = self.returncode, poll(self, flag)
        ours = self.ended_by_us or status == -signal.SIGTERM  # with which a reaper asks all of its group
        if before is None and status is not None and status < 0 and not ours:
            print(f"{KILLED}{self.name} (process {self.pid}) was {of_signal(-status)}", file=sys.stderr, flush=True)
        return status

    popen_fork.Popen.__init__, popen_fork.Popen.poll = named, telling  # type: ignore[assignment, method-assign]
    popen_fork.Popen._send_signal = noting  # type: ignore[attr-defined]


KILLED = "prl: "
"""How the line of a killed process begins in a log."""


def of_signal(number: int) -> str:
    """What a signal that ended a process says: `killed by SIGKILL (out of memory?)`."""
    with contextlib.suppress(ValueError):
        name = signal.Signals(number).name
        return f"killed by {name}{' (out of memory?)' if number == signal.SIGKILL else ''}"
    return f"killed by signal {number}"


if __name__ == "__main__":
    sys.exit(Reaper(sys.argv[1:]).run())
