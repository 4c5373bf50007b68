"""The owner of a run directory: one process at a time, by a lock of the kernel's on `run.lock`."""

import contextlib
import fcntl
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import msgspec

from prl.errors import UNREADABLE, ConfigError, PrlError

LOCK = "run.lock"


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
    On a file system without locks the file's content says whose it is, and whether that process is alive.

    Raises:
        ConfigError: another process owns it, naming that process and its machine.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _owned(run_dir, owner_of(run_dir)) from None
        except OSError:  # no locks here
            owner = owner_of(run_dir)
            if owner is not None and (owner.host != platform.node() or _began(owner.pid) == owner.began):
                raise _owned(run_dir, owner) from None
        file.truncate(0)
        file.write(msgspec.json.encode(Owner(platform.node(), os.getpid(), _began(os.getpid()))).decode() + "\n")
        file.flush()
        yield


def identity(run_dir: Path) -> tuple[int, int] | None:
    """Which file `run.lock` is: another one once the directory was removed, and None while there is none."""
    with contextlib.suppress(OSError):
        state = (run_dir / LOCK).stat()
        return state.st_dev, state.st_ino
    return None


def check_in_place(run_dir: Path, lock: tuple[int, int] | None) -> None:
    """Raise PrlError where the directory with this `lock` (`identity`) is not at its place any more."""
    if identity(run_dir) != lock:
        raise PrlError(f"run.dir={str(run_dir)!r} was removed or moved while the run wrote into it")


def owner_of(run_dir: Path) -> Owner | None:
    """The process that owns a run directory, or owned it last; None where it does not say."""
    try:
        return msgspec.json.decode((run_dir / LOCK).read_bytes(), type=Owner)
    except (OSError, *UNREADABLE):
        return None


def is_owned(run_dir: Path) -> bool:
    """Whether the process of the run is alive, as far as the file system's locks tell."""
    try:
        with (run_dir / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it is not there, or its file system has no locks
        return False
    return False


def _owned(run_dir: Path, owner: Owner | None) -> ConfigError:
    who = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
    return ConfigError(
        f"run.dir={str(run_dir)!r} belongs to {who}, which runs: wait for it or stop it. If it is gone for certain, "
        f"remove {run_dir / 'run.lock'}"
    )


def _began(pid: int) -> float | None:
    """When a process of this machine began, in clock ticks; None where there is none or it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else float(fields[19])
