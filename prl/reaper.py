"""Parent of one process of a run: ends its whole process group when the launcher goes away, however it goes.

    python -S reaper.py COMMAND [ARG …]        with a pipe from the launcher as standard input

The reaper leads a session and group of its own, and the command's processes are in it. When the pipe closes, which the
kernel does even for a launcher killed with SIGKILL, it ends that group: the engine's workers are grandchildren that
nobody else would end. When the command ends first, the reaper ends with its status, and the launcher clears the group.
Standard library only; it starts in milliseconds.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys

GRACE_S = 5.0
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent is gone, however it went. Linux only: nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run the command until it ends, or until the launcher is gone: then SIGTERM, time to finish, and SIGKILL."""
    # A handler, not SIG_IGN: the child would inherit being deaf, while a handler is reset for it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    while child.poll() is None:
        if select.select([0], [], [], 0.05)[0] and os.read(0, 1) == b"":  # the launcher is gone
            os.killpg(0, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
            os.killpg(0, signal.SIGKILL)  # the whole group, this process included
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main())
