"""Copies what processes write on the nodes of a Ray cluster to this machine."""

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from prl.base.errors import PrlError
from prl.base.files import naming
from prl.transport.ray import LOG, copy_folder, pieces

PULL_S = 0.5
"""Time between two looks at what is new, seconds."""


@dataclass
class Followed:
    """A process whose files are copied."""

    host: Any
    """Its actor."""
    log: Path
    """File here for its output."""
    run_dir: Path | None
    """Run directory here for everything else that it writes; None = it writes there itself."""
    copied: dict[str, int]
    """Bytes of each of its files that are here."""


class Relay:
    """Copies logs, and where there is no folder in common what the trainer writes to its run directory, as they grow.

    A part of a checkpoint is copied once it is complete, and appears whole.
    """

    def __init__(self) -> None:
        self.followed: dict[str, Followed] = {}
        """Files that are followed, by process."""
        self.error: Exception | None = None
        """Why it has stopped: this machine's disk may be full."""
        self._stopping = threading.Event()
        self._pulling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="prl-relay", daemon=True)

    def follow(self, name: str, host: Any, log: Path, run_dir: Path | None = None) -> None:
        """Copy what a process writes from now on."""
        # A process that was started again on another node writes its files anew.
        before = self.followed.get(name)
        copied = before.copied if before is not None and before.host == host else {}
        with naming(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
        self.followed[name] = Followed(host, log, run_dir, copied)
        if not self._thread.is_alive():
            self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(PULL_S):
            try:
                self.pull()
            except FileNotFoundError:  # a file of a process went between two calls
                continue
            except (OSError, PrlError, ray.exceptions.RayError) as error:
                self.error = error
                return

    def pull(self) -> None:
        """Copy what is new."""
        with self._pulling:
            for process in list(self.followed.values()):
                with contextlib.suppress(ray.exceptions.RayActorError):  # the launcher says that it is gone
                    pull_from(process)

    def close(self) -> None:
        """Stop copying."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()


def pull_from(process: Followed) -> None:
    """Copy what is new of one process."""
    for path, size in ray.get(process.host.written.remote()).items():
        here = process.log if path == LOG else process.run_dir / path if process.run_dir is not None else None
        start = process.copied.get(path, 0)
        if here is None or size <= start:
            continue
        with naming(here):
            here.parent.mkdir(parents=True, exist_ok=True)
            with here.open("ab") as file:
                for _, piece in pieces(process.host, {path: (start, size)}):
                    file.write(piece)
                    process.copied[path] = process.copied.get(path, 0) + len(piece)
    if process.run_dir is not None:
        for folder in ray.get(process.host.checkpoints.remote()):
            copy_folder(process.host, folder, process.run_dir / folder)
            ray.get(process.host.remove.remote(folder))
