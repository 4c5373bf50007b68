"""The owner of a run directory: one process at a time, by a lock of the kernel's on `run.lock`."""

import contextlib
import fcntl
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec

from prl.errors import UNREADABLE, ConfigError, PrlError
from prl.reaper import stat
from prl.wire.files import naming, open_lock, regular

LOCK = "run.lock"
BEAT_S, SILENT_S = 5.0, 30.0
"""[s] Time between two signs of life of an owner, and without one after which an owner elsewhere counts as gone."""
INSTANT_S = 1.0
"""How long readers may have the lock, seconds."""


class Owner(msgspec.Struct):
    """The process that a run directory belongs to: the content of `run.lock`."""

    host: str
    pid: int
    began: float | None
    """When the process began, in clock ticks of its machine: another may get its number later."""


@contextlib.contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Make this process the owner of a run directory, which is made if need be, until the block ends.

    The kernel's lock on `run.lock` goes with the process, however it ends, so one that is left behind holds nobody up.
    On a file system without locks the file's content says whose it is, and whether that process is alive. One that does
    not share locks between machines gives everyone the lock: an owner elsewhere touches the file as long as it lives.
    The directory is held open, so that no other gets its inode.

    Raises:
        ConfigError: another process owns it, naming that process and its machine; or the lock is a link.
    """
    with naming(run_dir / LOCK):
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open_lock(run_dir / LOCK)
    with file, _held_open(run_dir):
        try:
            _lock(file)
        except BlockingIOError:
            raise _owned(run_dir, owner_of(run_dir)) from None
        except OSError:  # no locks here
            owner = owner_of(run_dir)
            if owner is not None and (owner.host != platform.node() or _began(owner.pid) == owner.began):
                gone = f". If it is gone for certain, remove {run_dir / LOCK}"  # a lock of the kernel's goes by itself
                raise _owned(run_dir, owner, gone) from None
        owner = owner_of(run_dir)
        if owner is not None and owner.host != platform.node() and _is_touched(run_dir / LOCK, owner):
            raise _owned(run_dir, owner)
        file.truncate(0)
        file.write(msgspec.json.encode(Owner(platform.node(), os.getpid(), _began(os.getpid()))).decode() + "\n")
        file.flush()
        ended = threading.Event()
        threading.Thread(target=_touch, args=[file.fileno(), ended], name="prl-owner", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            file.truncate(0)  # who comes next need not wait


def _touch(file: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(file)


def _is_touched(lock: Path, owner: Owner) -> bool:
    """Whether somebody touches the lock within `SILENT_S`. A file that is opened anew shows what others did to it."""
    print(f"{lock} is of process {owner.pid} on {owner.host}: looking whether it lives", file=sys.stderr, flush=True)
    before, deadline = lock.stat().st_mtime_ns, time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(BEAT_S / 10)
        with lock.open() as file:
            if os.fstat(file.fileno()).st_mtime_ns != before:
                return True
    return False


class Identity(NamedTuple):
    """Which directory and which file are at the places of a run directory and its `run.lock`; None where none is."""

    folder: tuple[int, int] | None
    lock: tuple[int, int] | None


def identity(run_dir: Path) -> Identity:
    """What is at the place of a run directory now: something else once the directory was removed or moved."""
    return Identity(_inode(run_dir), _inode(run_dir / LOCK))


def check_in_place(run_dir: Path, own: Identity) -> None:
    """Raise PrlError where the directory or its lock (`own`, of `identity`) is not at its place any more."""
    now = identity(run_dir)
    if now.folder != own.folder:
        raise PrlError(f"run.dir={str(run_dir)!r} was removed or moved while the run wrote into it")
    if now.lock != own.lock:
        raise PrlError(
            f"{run_dir / LOCK} was removed or replaced while the run held it, so another run could begin there: leave "
            "it to the run, whose end frees it"
        )


def owner_of(run_dir: Path) -> Owner | None:
    """The process that owns a run directory, or owned it last; None where it does not say."""
    try:
        return msgspec.json.decode(regular(run_dir / LOCK).read_bytes(), type=Owner)
    except (OSError, *UNREADABLE):
        return None


def is_owned(run_dir: Path) -> bool:
    """Whether the process of the run is alive, as far as the file system's locks tell."""
    try:
        with regular(run_dir / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            touched = os.fstat(file.fileno()).st_mtime
    except BlockingIOError:
        return True
    except OSError:  # it is not there, or its file system has no locks
        return False
    owner = owner_of(run_dir)
    return owner is not None and owner.host != platform.node() and time.time() - touched < SILENT_S


def refuse_owned(run_dir: Path) -> None:
    """Raise ConfigError, as `owned` does, where the process of the run is alive."""
    if is_owned(run_dir):
        raise _owned(run_dir, owner_of(run_dir))


def _lock(file: TextIO) -> None:
    """Lock a file for this process alone. Raises BlockingIOError where another one keeps it.

    A reader has it for an instant (`is_owned`), so this tries again for `INSTANT_S`.
    """
    deadline = time.monotonic() + INSTANT_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _owned(run_dir: Path, owner: Owner | None, gone: str = "") -> ConfigError:
    who = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
    return ConfigError(f"run.dir={str(run_dir)!r} belongs to {who}, which runs: wait for it or stop it{gone}")


def _inode(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        state = path.stat()
        return state.st_dev, state.st_ino
    return None


@contextlib.contextmanager
def _held_open(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield
    finally:
        os.close(handle)


def _began(pid: int) -> float | None:
    """When a process of this machine began, in clock ticks; None where there is none or it is dead."""
    fields = stat(pid)
    return float(fields[19]) if fields else None
