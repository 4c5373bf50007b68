"""The process that workers of an env are forked from.

It is forked from the run once the env's tasks are loaded, while the run has no other thread. It runs no code of the
env: it forks workers when it is asked to, which takes milliseconds, ends them, and tells how they ended. It ends with
its parent.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterable

from prl.episodes.frames import Marks
from prl.episodes.worker import Handler, restore_streams, run_worker
from prl.reaper import die_with_parent, fork, of_signal

ENDED = struct.Struct("!ii")
"""What the template says of a worker that has ended: its number and its wait status."""
ORDER = struct.Struct("!ci")
"""What the template is asked: to fork (`f`) worker number n, with its two files, or to kill (`k`) it."""


def leave_parent(keep: Iterable[int], *, with_parent: bool = True) -> None:
    """Make a fork a process of its own: its session, its signals, and of its parent's files only `keep` and 0 to 2.

    The others stay open on nothing, so that no number is given out twice: objects of the parent may still close them.
    With `with_parent` it dies with the thread that has forked it.
    """
    parent = os.getppid()
    os.setsid()
    if with_parent:
        die_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    nothing, kept = os.open(os.devnull, os.O_RDWR), {1, 2, *keep}
    for number in [int(name) for name in os.listdir("/dev/fd")]:
        if number not in kept and number != nothing:
            with contextlib.suppress(OSError):
                os.fstat(number)  # that of the listing itself is closed
                os.dup2(nothing, number)


def run_template(
    control: socket.socket, marks: Marks, handler: Handler, memory: int, *, by_main_thread: bool = True
) -> None:
    """Fork a worker for each order that comes with a channel and an output, until `control` closes."""
    leave_parent({control.fileno()}, with_parent=by_main_thread)
    restore_streams()
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    gc.freeze()  # a collection in a worker would copy every page of what was loaded
    workers: dict[int, int] = {}  # by process id, their numbers
    with contextlib.suppress(OSError):  # the other end is gone
        while True:
            ready, _, _ = select.select([control.fileno(), woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
            if control.fileno() in ready:
                order, files, _, _ = socket.recv_fds(control, ORDER.size, 2)
                if not order:
                    break
                kind, number = ORDER.unpack(order)
                if kind == b"f":
                    channel, output = files
                    pid = fork(lambda: _become_worker(channel, output, number, marks, handler, memory))  # noqa: B023
                    workers[pid] = number
                    for file in files:
                        os.close(file)
                else:
                    _kill(pid for pid, each in workers.items() if each == number)
            while workers and (ended := os.waitpid(-1, os.WNOHANG | os.WUNTRACED))[0]:
                if os.WIFSTOPPED(ended[1]):  # its calls would wait for their deadline
                    _kill(ended[:1])
                elif ended[0] in workers:
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


def _become_worker(channel: int, output: int, slot: int, marks: Marks, handler: Handler, memory: int) -> None:
    leave_parent({channel, output})
    run_worker(channel, output, slot, marks, handler, memory)


def order_worker(control: socket.socket, slot: int) -> tuple[socket.socket, int]:
    """Have the template fork a worker; return the channel to it, and the file of what it prints. Raises OSError."""
    ours, theirs = socket.socketpair()
    output, printed = os.pipe()
    os.set_blocking(output, False)
    try:
        socket.send_fds(control, [ORDER.pack(b"f", slot)], [theirs.fileno(), printed])
    except OSError:
        ours.close()
        os.close(output)
        raise
    finally:
        theirs.close()
        os.close(printed)
    return ours, output


def how_template_ended(pid: int) -> str | None:
    """How the template ended, as the end of a sentence; None while it runs, or once `end_template` is through."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # the id stays taken
        if ended is not None:
            signaled = ended.si_code != os.CLD_EXITED
            return f"was {of_signal(ended.si_status)}" if signaled else f"ended with status {ended.si_status}"
    return None


def end_template(control: socket.socket, pid: int) -> None:
    """End the template by closing its control; wait for it, and kill it where it does not end."""
    control.close()
    deadline = time.monotonic() + 2.0
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
