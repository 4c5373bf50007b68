"""A run on a node of a Ray cluster: an actor for each process, which owns it and the folders it works in."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np
import ray
import ray.util

from prl.base.files import write_atomically, writing
from prl.config.environment import LOOPBACK
from prl.engines.base import EngineSpec
from prl.launch import children, local
from prl.launch.plan import TrainerSpec
from prl.launch.processes import Explain, Process
from prl.transport.files import BATCHES, WEIGHTS
from prl.transport.ray import LOG, copy_files

MEMORY = Path("/dev/shm")
"""Files here are in memory, on Linux."""
CHECKPOINTS = "checkpoints"
POLL_S = 0.01


@dataclass(frozen=True)
class Node:
    """A node of a Ray cluster, as an actor on it sees it."""

    id: str
    address: str
    prl: str
    """Version."""
    folder: str
    """Folder of the weights of policy versions."""
    room: int
    """Bytes that are free there."""


class Host:
    """Owns one process of a run, on the node where Ray has placed it.

    The folders that the process works in go with it: one in memory for weights, one on disk for what a process of a
    local run writes to the run directory. The actor ends with its node: Ray leaves those of a killed raylet running.
    """

    def __init__(self) -> None:
        children.die_with_parent()
        self.disk = Path(tempfile.mkdtemp(prefix="prl-"))
        self.memory = Path(tempfile.mkdtemp(prefix="prl-", dir=MEMORY if MEMORY.is_dir() else None))
        self.run_dir = self.disk / "run"
        self.log = self.disk / "process.log"
        """File for the output of the process."""
        self.run_dir.mkdir()
        # The trainer publishes as in a run directory, and its weights are in memory.
        (self.run_dir / WEIGHTS).symlink_to(self.memory)
        self.alive = removed_at_the_end([self.disk, self.memory])
        self.process: Process | None = None
        self.fetching = asyncio.Lock()
        """Lock by which of two calls for the same version one copies it."""

    async def node(self) -> Node:
        """Look at the node."""
        return Node(
            id=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            prl=version("prl"),
            folder=str(self.memory),
            room=shutil.disk_usage(self.memory).free,
        )

    def sees(self, path: str) -> bool:
        """Return whether a folder is there."""
        return Path(path).is_dir()

    def has(self, path: str, content: bytes) -> bool:
        """Return whether a file is there with this content: a folder of the same path may be another one."""
        return Path(path).is_file() and Path(path).read_bytes() == content

    # --- the process --------------------------------------------------------------------------------------------------

    def serve(self, spec: EngineSpec, environment: dict[str, str]) -> int:
        """Start a model server, instead of one that has ended. Returns its port. It finds weights by relative paths."""
        if self.process is not None:
            self.process.end()
        port = local.free_port(spec.config.host, spec.config.port)
        server = spec.server
        env = server.environment(spec) | environment
        self._start(spec.process, server.command(spec, port), env, self.memory, explain=server.explain)
        return port

    def meeting_port(self) -> int:
        """Return a free port for ranks to meet at."""
        return local.free_port("0.0.0.0")

    def train(
        self, spec: TrainerSpec, name: str, environment: dict[str, str], cwd: str, *, apart: bool, carried: bool
    ) -> None:
        """Start a rank of the trainer.

        Args:
            spec: the trainer.
            name: of the rank's process.
            environment: variables beside the usual ones, torch's rendezvous among them.
            cwd: the folder that it works in, where this node has it.
            apart: whether other ranks are on other machines, so that loopback does not reach them.
            carried: whether the rank is to work in this node's folder instead of the run directory.
        """
        if carried:
            spec = replace(spec, run_dir=self.run_dir)
        usual = local.trainer_environment(spec.model, spec.threads)
        if apart:
            usual = {key: value for key, value in usual.items() if key not in LOOPBACK}
        # Relative paths of the user's count from there; another machine may not have it.
        place = Path(cwd) if self.sees(cwd) else None
        process = self._start(name, local.trainer_command(spec), usual | environment, place, stdin=subprocess.PIPE)
        process.tell(spec.payload)

    def _start(
        self,
        name: str,
        command: list[str],
        env: dict[str, str],
        cwd: Path | None = None,
        explain: Explain | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> Process:
        scratch = self.disk / "tmp"
        scratch.mkdir(exist_ok=True)
        self.process = Process(name, command, env, self.log, scratch, cwd, explain, stdin)
        return self.process

    async def ended(self, log: str) -> tuple[int, str]:
        """Wait for the process to end. Returns its status and why it ended; its output is copied to `log`."""
        assert self.process is not None
        while self.process.status is None:  # noqa: ASYNC110  nobody else waits for it
            await asyncio.sleep(POLL_S)
        return self.process.status, self.process.ending().replace(str(self.log), log)

    def ask(self) -> None:
        """Ask the process to end."""
        if self.process is not None:
            self.process.ask()

    async def stop(self) -> None:
        """Ask the process to end, kill what is left of it after the time of grace, and remove the folders."""
        self.ask()
        if self.process is not None:
            for _ in range(int(children.GRACE_S / POLL_S)):
                if self.process.status is not None:
                    break
                await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.process.end)
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.disk, ignore_errors=True)

    # --- files of the run directory -----------------------------------------------------------------------------------

    def write(self, path: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        write_atomically(self.run_dir / path, data)

    def folder(self, path: str) -> str:
        """Return the path of a folder on this node."""
        return str(self.run_dir / path)

    def append(self, path: str, data: bytes) -> None:
        """Add to a file."""
        file = self.run_dir / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as opened:
            opened.write(data)

    def read(self, path: str, offset: int, size: int) -> np.ndarray:
        """Read bytes of a file, or of the process's log (`LOG`). Of an array Ray makes no further copies."""
        return np.fromfile(self.log if path == LOG else self.run_dir / path, np.uint8, size, offset=offset)

    def content(self, path: str) -> bytes | None:
        """Return the content of a file; None while it is not there."""
        file = self.run_dir / path
        return file.read_bytes() if file.exists() else None

    async def awaited(self, path: str) -> bytes:
        """Wait for a file. Returns its content."""
        while True:
            data = self.content(path)
            if data is not None:
                return data
            await asyncio.sleep(POLL_S)

    def remove(self, path: str) -> None:
        """Remove a folder; one that is not there is no error."""
        shutil.rmtree(self.run_dir / path, ignore_errors=True)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder, by its path below that."""
        start = self.run_dir / folder
        return {str(path.relative_to(start)): path.stat().st_size for path in start.rglob("*") if path.is_file()}

    async def holding(self, folder: str) -> tuple[Node, dict[str, int]]:
        """Return what `node` and `sizes` do, in one call."""
        return await self.node(), self.sizes(folder)

    def written(self) -> dict[str, int]:
        """Return the bytes of files that only grow: the log (`LOG`), and all but batches, weights and checkpoints."""
        others = [each for each in self.run_dir.iterdir() if each.name not in (BATCHES, WEIGHTS, CHECKPOINTS, "resume")]
        files = [file for folder in others for file in folder.rglob("[!.]*") if file.is_file()]
        sizes = {str(file.relative_to(self.run_dir)): file.stat().st_size for file in files}
        return sizes if self.process is None else sizes | {LOG: self.log.stat().st_size}

    def checkpoints(self) -> list[str]:
        """Return the folders of the trainer's parts of checkpoints, which are complete."""
        folders = (self.run_dir / CHECKPOINTS).glob(".step_*")
        return [f"{CHECKPOINTS}/{folder.name}" for folder in folders if not folder.name.endswith(".writing")]

    # --- weights ------------------------------------------------------------------------------------------------------

    def versions(self) -> list[str]:
        """Return the names of the versions whose weights are here."""
        return [folder.name for folder in self.memory.glob("step_*") if not folder.name.endswith(".writing")]

    async def fetch(self, name: str, holder: Any, _: None = None) -> None:
        """Have the weights of a version here that another host has; where it is on this node, as links to its files.

        The last argument may be the answer of a call that has to come before.
        """
        final = self.memory / name
        async with self.fetching:
            if final.exists():
                return
            path = f"{WEIGHTS}/{name}"
            there, sizes = await holder.holding.remote(path)
            if there.id == ray.get_runtime_context().get_node_id():
                with writing(final) as folder:
                    shutil.copytree(Path(there.folder) / name, folder, copy_function=os.link, dirs_exist_ok=True)
            else:
                await asyncio.to_thread(copy_files, holder, path, sizes, final)


def removed_at_the_end(folders: Sequence[Path]) -> IO[bytes] | None:
    """Have folders removed once this process has ended, however that was. Returns what has to live until then.

    Not by the supervisor of the actor's process, which is there only while that runs.
    """
    script = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf "$@") >/dev/null 2>&1 &'
    shell = subprocess.Popen(
        ["sh", "-c", script, "sh", *map(str, folders)], stdin=subprocess.PIPE, start_new_session=True
    )
    shell.wait()
    return shell.stdin
