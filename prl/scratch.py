"""The folder that a launcher's processes keep their temporary files and sockets in, and its keeper, which removes it.

    python -S -P scratch.py FOLDER        with a pipe from the launcher as standard input

Whoever still works in the folder holds a lock on it: the launcher and its reapers. The keeper waits until the pipe
closes and the lock is free, so it outlives them, however they end; then it kills every process that has the folder's
mark in its environment, and removes the folder and the shared memory that is named after it. Where the keeper was
killed too, the next launcher does that. Standard library only; it starts in milliseconds.
"""

import contextlib
import fcntl
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PREFIX, MARK = "prl-run-", "PRL_SCRATCH"
LONGEST = 50
"""Bytes that the path above the folder may have: with a name of theirs, sockets in it must stay below 108."""
LEAVING_S = 8.0
"""How long reapers may take once their launcher is gone, seconds: more than their `GRACE_S`."""
YOUNG_S = 60.0
"""A folder this young may not be locked yet."""


class Scratch:
    """A fresh folder, mode 0700, with its keeper."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()  # what its locale cannot say, libraries cannot open
        fits = len(os.fsencode(base)) <= LONGEST and base.isprintable()
        self.path = Path(base if fits else "/tmp") / (PREFIX + secrets.token_hex(4))
        clear_stale(self.path.parent)
        self.path.mkdir(mode=0o700)
        self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody takes the folder for stale
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.keeper = subprocess.Popen(
            [sys.executable, "-S", "-P", __file__, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    @property
    def environment(self) -> dict[str, str]:
        """What a process gets in its environment to work in the folder."""
        path = str(self.path)
        return {"TMPDIR": path, "VLLM_RPC_BASE_PATH": path, MARK: path}

    def remove(self) -> None:
        """Remove the folder once the processes in it have ended."""
        with contextlib.suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_UN)  # also where a forked child of this process holds it
        os.close(self.lock)
        try:
            self.keeper.communicate(b"\n", timeout=LEAVING_S)  # heard also where a forked child has the pipe open
        except subprocess.TimeoutExpired:  # it is stopped, and would stay
            self.keeper.kill()
            self.keeper.wait()
        if self.path.exists():  # the keeper was killed
            clear(self.path)


def cache_folder() -> Path:
    """Where prl keeps what outlives a run and can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "prl"


def name_shared_memory() -> None:
    """Have shared memory and semaphores that this process makes with `multiprocessing` named after the run's folder."""
    if (folder := os.environ.get(MARK)) is None:
        return
    from multiprocessing import process, shared_memory

    shared_memory._SHM_NAME_PREFIX = f"/{memory_name(folder)}"  # type: ignore[attr-defined]
    process.current_process()._config["semprefix"] = f"/{memory_name(folder)}"  # type: ignore[attr-defined]


def memory_name(folder: str | Path) -> str:
    """How the names of the shared memory of a folder's processes begin."""
    return f"p{Path(folder).name.removeprefix(PREFIX)}"


def marked(folder: Path) -> list[int]:
    """The processes that work in `folder`, other than this one."""
    mark, found = os.fsencode(f"\0{MARK}={folder}\0"), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in b"\0" + path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def clear(folder: Path) -> None:
    """Kill what works in `folder`, and remove it with its shared memory."""
    for inner in folder.glob(f"{PREFIX}????????"):  # of a launcher that one of the processes had
        clear(inner)
    deadline = time.monotonic() + LEAVING_S
    while (left := marked(folder)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    memory = Path("/dev/shm")
    for path in [*memory.glob(f"{memory_name(folder)}*"), *memory.glob(f"sem.{memory_name(folder)}*")]:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def free(folder: Path) -> bool:
    """Whether nobody holds the folder's lock; also where it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def clear_stale(base: Path) -> None:
    """Clear folders whose launcher, reapers and keeper were all killed, or that a crash of the machine has left."""
    for folder in base.glob(f"{PREFIX}????????"):
        with contextlib.suppress(OSError):
            state = folder.lstat()
            if state.st_uid == os.getuid() and time.time() - state.st_ctime > YOUNG_S and free(folder):
                clear(folder)


def keep(folder: Path) -> None:
    """Wait until the launcher is gone and its reapers are, or should be, and clear the folder."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # who ends all processes of a job means the others
    heard = [0]
    with contextlib.suppress(AttributeError, OSError):
        heard.append(os.pidfd_open(os.getppid()))
    select.select(heard, [], [])
    deadline = time.monotonic() + LEAVING_S
    while not free(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    clear(folder)


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
