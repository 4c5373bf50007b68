"""The owner of a run directory: one process at a time has the lock on `run.lock`; `run.holder` says which."""

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock

from prl.base.errors import ConfigError
from prl.base.files import naming
from prl.runs.provenance import command_line

LOCK, HOLDER = "run.lock", "run.holder"
READERS_S = 0.5
"""[s] Time for readers, who have the lock for an instant (`is_owned`), to let go of it."""


@contextlib.contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Make this process the owner of a run directory, which is made if need be, until the block ends.

    The lock goes with the process, however that ends. Raises ConfigError, with its owner, where another process has it.
    """
    with naming(run_dir / LOCK):
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(run_dir / LOCK, timeout=READERS_S)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise _owned_by_another(run_dir) from None
    try:
        holder = f"process {os.getpid()} on {platform.node()} ({command_line(sys.orig_argv)})"
        (run_dir / HOLDER).write_text(holder, encoding="utf-8")
        yield
    finally:
        # The files stay: to remove a lock file that somebody else has just opened would make two owners.
        lock.release()


def is_owned(run_dir: Path) -> bool:
    """Return whether the process of the run is alive, as far as the file system's locks tell."""
    if not (run_dir / LOCK).is_file():
        return False
    try:
        # Taking the lock for an instant is the only way to ask; `owned` waits that long (`READERS_S`).
        with filelock.FileLock(run_dir / LOCK, blocking=False):
            return False
    except filelock.Timeout:
        return True
    except OSError:  # somebody else's, which this user cannot lock
        return False


def refuse_owned(run_dir: Path) -> None:
    """Raise ConfigError, as `owned` does, where the process of the run is alive."""
    if is_owned(run_dir):
        raise _owned_by_another(run_dir)


def _owned_by_another(run_dir: Path) -> ConfigError:
    holder = "another process"
    with contextlib.suppress(OSError, ValueError):
        holder = (run_dir / HOLDER).read_text(encoding="utf-8")
    return ConfigError(f"run.dir={str(run_dir)!r} belongs to {holder}, which runs: wait for it or stop it")
