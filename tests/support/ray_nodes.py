"""A Ray cluster of several nodes on this machine, made with Ray's own commands."""

import contextlib
import gc
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import ray
from run_processes import family, wait_until

from prl.launch.local import free_port

RAY = str(Path(sys.executable).with_name("ray"))
OURS = ("prl.trainer", "prl.engines.vllm.server", "VLLM::", "children.py", "ray::Host")
"""Parts of the command lines of what a run starts."""
START_S = 240.0
"""[s] Deadline for a node to start: one of a busy machine took 110 s."""
BLIND = "mount -t tmpfs none {folder} && exec {command}"
"""A node with a mount of its own over a folder: it sees nothing of what is there."""


class Nodes:
    """Nodes by name. Each is a `ray start --block`, which owns its raylet and what that starts."""

    def __init__(self, folder: Path):
        self.port = free_port("127.0.0.1")
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            "RAY_ADDRESS": f"{ray.util.get_node_ip_address()}:{self.port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        """What a command needs to join."""

    def add(self, name: str, cpus: int, *, gpus: int = 0, blind_to: Path | None = None) -> None:
        """Add a node; the first one is the head."""
        where = (
            ["--address", self.environment["RAY_ADDRESS"]] if self.processes else ["--head", "--port", str(self.port)]
        )
        where += [] if self.processes else ["--temp-dir", str(self.folder), "--include-dashboard=false"]
        command = [
            RAY,
            "start",
            *where,
            "--num-cpus",
            str(cpus),
            "--num-gpus",
            str(gpus),
            "--block",
            "--disable-usage-stats",
        ]
        command += ["--object-store-memory", "100000000"]
        if blind_to is not None:
            command = ["unshare", "-m", "sh", "-c", BLIND.format(folder=blind_to, command=" ".join(command))]
        with (self.folder / f"{name}.log").open("wb") as log:
            env = os.environ | self.environment
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        wait_until(lambda: b"--block" in (self.folder / f"{name}.log").read_bytes(), START_S, f"{name} has started")

    def kill(self, name: str) -> None:
        """Kill a node's raylet, which is what Ray sees of the end of a machine."""
        (pid,) = self.running("raylet/raylet ", name)
        os.kill(pid, signal.SIGKILL)

    def running(self, text: str, *names: str) -> dict[int, str]:
        """Processes with `text` in their command lines and the nodes that they are on, of these nodes or of all."""
        found = {}
        for name in names or self.processes:
            lines = family(self.processes[name].pid)
            found |= {pid: name for pid, line in lines.items() if text in line and "children.py" not in line}
        return found

    def left(self) -> list[str]:
        """The command lines of the processes of runs that still live, also of those that have lost their parents."""
        mark = f"RAY_ADDRESS={self.environment['RAY_ADDRESS']}\0".encode()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                line = " ".join(process.cmdline())
                ours = any(text in line for text in OURS) and mark in Path(f"/proc/{process.pid}/environ").read_bytes()
                found += [line[:200]] * ours
        return found

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            left = [process.pid, *family(process.pid)]
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def ray_nodes(token=True):
    """Nodes that end with the block. Their folder has a short path: a socket's has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        nodes = Nodes(Path(folder))
        if not token:  # as for this process, which has imported Ray with what the environment had then
            nodes.environment = {"RAY_ADDRESS": nodes.environment["RAY_ADDRESS"], "RAY_AUTH_MODE": "disabled"}
        try:
            yield nodes
        finally:
            nodes.close()
            gc.collect()  # handles of its actors: those of the next cluster have the same ids
