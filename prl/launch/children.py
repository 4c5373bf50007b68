"""The life of processes: whatever ends a run or a part of it, no process stays behind.

    python -P children.py LAUNCHER FOLDER COMMAND [ARG …]

runs a command under a supervisor. As a subreaper it adopts each descendant whose own parent has ended. Once the command
has ended, or the launcher has (process `LAUNCHER`), be it by SIGKILL, it ends what is left; without a launcher it also
removes the run's folder for temporary files. Where the supervisor is killed itself, the kernel ends the command.
"""

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil

GRACE_S = 5.0
"""[s] Time for processes to end once they are asked to."""
POLL_S = 0.05
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (prctl(2)). Linux only: other systems have neither of them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(pid: int) -> list[psutil.Process]:
    """Return the processes below `pid` that have not ended.

    Not `multiprocessing`'s resource trackers: they end by themselves after those that they free shared memory for.
    """
    result = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # which psutil says of a zombie, too
                if "resource_tracker" not in " ".join(process.cmdline()):
                    result.append(process)
    return result


def send(number: signal.Signals, processes: list[psutil.Process]) -> None:
    """Send a signal to those of the processes that have not ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


def end_descendants(pid: int, grace_s: float) -> None:
    """Ask every process below `pid` to end. After `grace_s` kill what is left, and what that starts meanwhile."""
    asked = descendants(pid)
    for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped receives SIGTERM when it goes on
        send(number, asked)
    due = time.monotonic() + grace_s
    while (left := descendants(pid)) and time.monotonic() < due + GRACE_S:
        if time.monotonic() >= due:
            send(signal.SIGKILL, left)
        time.sleep(POLL_S)


def leave_none() -> None:
    """Have this process, a command, end what it has started when it exits, and what that has left."""
    import multiprocessing.util  # noqa: F401  its exit handler, which waits for children, has to run after this one

    from prl.base import garbage  # not there where this file is a supervisor

    prctl(PR_SET_CHILD_SUBREAPER, 1)
    garbage.skip_last()
    atexit.register(end_descendants, os.getpid(), GRACE_S)


def supervise(launcher: int, folder: str, command: list[str]) -> int:
    """Run a command until it or the launcher ends, then end what is left of it. Return its status."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # for the command, which would inherit SIG_IGN
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(command, preexec_fn=die_with_parent)
    status = 0
    while os.getppid() == launcher:
        ended, status = os.waitpid(-1, os.WNOHANG)  # -1: also those that it has adopted
        if ended == child.pid:
            break
        time.sleep(0 if ended else POLL_S)
    end_descendants(os.getpid(), GRACE_S)
    if os.getppid() != launcher:
        shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
