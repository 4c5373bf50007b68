"""The launcher for one machine: every process of the run is a child of this one, and none is left behind."""

import errno
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom

from prl.base.errors import PrlError
from prl.config.environment import model_environment
from prl.config.gpus import visible_devices
from prl.config.schema import ModelConfig
from prl.config.trainer import KEPT, MEETING_VARIABLE, OWN_PAGES
from prl.engines.base import EngineSpec
from prl.launch import children
from prl.launch.launcher import Launcher, ProcessDied
from prl.launch.plan import TrainerSpec
from prl.launch.processes import Explain, Process

PORTS = range(20000, 32768)
"""Above those of Ray's workers, below those that Linux gives to connections."""


@dataclass(kw_only=True)
class LocalLauncher(Launcher):
    """Starts engine and trainer as children of this process, under a supervisor each (`prl.launch.children`)."""

    processes: list[Process] = field(default_factory=list, init=False, repr=False)
    ranks: list[Process] = field(default_factory=list, init=False, repr=False)
    """Those of the processes that are the trainer's."""
    engines: dict[str, tuple[EngineSpec, int]] = field(default_factory=dict, init=False, repr=False)
    """Engines and their ports, by process."""
    leaving: list[Process] = field(default_factory=list, init=False, repr=False)
    """Engines that nobody needs any more, until all is stopped."""
    folder: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False, repr=False)
    """Folder for temporary files of the processes, from the first one on."""

    @property
    def scratch(self) -> Path:
        """The folder for temporary files of the run's processes."""
        if self.folder is None:
            # The path of a socket has 107 characters at most, 36 of which are the name that a server gives it.
            elsewhere = None if len(tempfile.gettempdir()) <= 50 else "/tmp"
            self.folder = tempfile.TemporaryDirectory(prefix="prl-", dir=elsewhere, ignore_cleanup_errors=True)
        return Path(self.folder.name)

    @property
    def meeting(self) -> Path:
        """The file by which the trainer's ranks find each other."""
        return self.scratch / "ranks"

    def start(
        self,
        name: str,
        command: list[str],
        *,
        env: dict[str, str],
        log: Path,
        explain: Explain | None = None,
        stdin: int = subprocess.DEVNULL,
        may_finish: bool = False,
    ) -> Process:
        """Start any command as a process of the run, which `may_finish` before that.

        `explain` finds the reason of its end in its log.
        """
        process = Process(name, command, env, log, self.scratch, None, explain, stdin, may_finish)
        self.processes.append(process)
        return process

    def start_engine(self, spec: EngineSpec) -> str:
        self.engines[spec.process] = spec, self._port_for(spec)
        return self._serve(spec.process)

    def _port_for(self, spec: EngineSpec) -> int:
        """A port for an engine; not one of another's that does not listen yet."""
        taken = {port for name, (_, port) in self.engines.items() if name != spec.process}
        while (port := free_port(spec.config.host, spec.config.port)) in taken and spec.config.port is None:
            pass
        return port

    def restart_engine(self, name: str) -> str | None:
        if name not in self.engines:
            return None
        for process in [process for process in self.processes if process.name == name]:
            process.end()
            self.processes.remove(process)
        return self._serve(name)

    def _serve(self, name: str) -> str:
        spec, port = self.engines[name]
        server = spec.server
        env = server.environment(spec)
        self.start(name, server.command(spec, port), env=env, log=spec.log, explain=server.explain)
        return base_url(spec.config.host, port)

    def warm_trainer(self, spec: TrainerSpec) -> None:
        started = {process.name for process in self.ranks}
        for rank, (name, env) in enumerate(self._ranks(spec).items()):
            if name in started or rank < spec.first:
                continue
            log, command = rank_log(spec.run_dir, rank), trainer_command(spec)
            self.ranks.append(self.start(name, command, env=env, log=log, stdin=subprocess.PIPE, may_finish=True))

    def start_trainer(self, spec: TrainerSpec) -> None:
        self.warm_trainer(spec)  # also the ranks that could not be started early
        for process in self.ranks:
            process.tell(spec.payload)

    def _ranks(self, spec: TrainerSpec) -> dict[str, dict[str, str]]:
        """Return what each rank of the trainer has in its environment, by the name of its process."""
        env = trainer_environment(spec.model, spec.threads)
        gpus = spec.gpus or [()] * spec.num_processes
        if spec.num_processes == 1:
            return {spec.names[0]: env | visible_devices(gpus[0])}
        # Not torchrun: its ranks meet at a TCP port that is open to the network, and it unpickles what it finds there.
        common = {"WORLD_SIZE": str(spec.num_processes), MEETING_VARIABLE: str(self.meeting)}
        ranks = {}
        for rank, own in enumerate(gpus):  # each sees no GPU but its own
            numbers = {"RANK": str(rank), "LOCAL_RANK": "0"}
            ranks[spec.names[rank]] = env | common | numbers | visible_devices(own)
        return ranks

    def ensure_alive(self) -> None:
        bad = [(p, status) for p in self.processes if (status := p.status) is not None and (status or not p.may_finish)]
        if bad:
            # A rank that loses another ends with an error; one that a signal ended is the cause of that.
            process = max(bad, key=lambda pair: pair[1] > 128)[0]
            raise ProcessDied(process.ending(), process.name)

    async def finish(self, timeout_s: float) -> None:
        self.leaving += [process for process in self.processes if not process.may_finish]
        self.processes = [process for process in self.processes if process.may_finish]
        for process in self.leaving:  # they end while the trainer writes
            process.ask()
        await self.wait_until(lambda: all(rank.status is not None for rank in self.processes), timeout_s)
        self.ensure_alive()

    def stop(self) -> None:
        """Ask every process to stop, and end the whole tree of each once it has, or after the time of grace."""
        # All are asked before one is waited for: they end side by side.
        processes = [*self.processes, *self.leaving]
        for process in processes:
            process.ask()
        deadline = time.monotonic() + children.GRACE_S
        for process in processes:
            while process.status is None and time.monotonic() < deadline:
                time.sleep(0.02)
            process.end()
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


def rank_log(run_dir: Path, rank: int) -> Path:
    """Return where the output of a rank goes."""
    return run_dir / "logs" / (f"trainer_rank_{rank}.log" if rank else "trainer.log")


def base_url(host: str, port: int) -> str:
    """The base URL of a server that listens there."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def free_port(host: str, port: int | None = None) -> int:
    """A TCP port that is free now: `port` if it is given. Raises PrlError where an engine cannot listen there.

    One of `PORTS` where there is one: of others the kernel may give it to a connection before the process listens.
    """
    candidates = [port] if port is not None else [*SystemRandom().sample(PORTS, 64), 0]
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT can be had
        for candidate in candidates:
            try:
                sock.bind((host, candidate))
                break
            except (OSError, UnicodeError) as error:  # a name that is none
                if getattr(error, "errno", None) == errno.EADDRINUSE and candidate != candidates[-1]:
                    continue
                reason = getattr(error, "strerror", None) or error
                raise PrlError(
                    f"an engine cannot listen on {host[:80]}, port {port or 'any'}: {reason}: choose another"
                ) from error
        return sock.getsockname()[1]


def trainer_environment(model: ModelConfig, threads: int) -> dict[str, str]:
    """Environment variables of every rank of the trainer."""
    return model_environment(model, threads) | {
        # Pages of 2 MiB for large tensors, new in each step: a third of the page faults, 6 % less processor time.
        "THP_MEM_ALLOC_ENABLE": "1",
        # By itself glibc soon takes activations from one heap, where they leave holes between what lives longer.
        "MALLOC_MMAP_THRESHOLD_": str(OWN_PAGES),
        "MALLOC_TRIM_THRESHOLD_": str(KEPT),
    }


def trainer_command(spec: TrainerSpec) -> list[str]:
    """The command line of each rank of the trainer."""
    return [sys.executable, "-m", spec.module, str(spec.run_dir.resolve())]
