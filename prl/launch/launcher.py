"""The interface of a launcher, which starts, watches and stops the processes of a run."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from prl.base.errors import ConfigError, PrlError
from prl.config.gpus import Gpus
from prl.config.schema import ModelConfig
from prl.engines.base import EngineSpec
from prl.transport.files import FileTransport
from prl.weights.base import Weights

POLL_S = 0.1


class ProcessDied(PrlError):
    """A process of the run ended before the run did."""

    def __init__(self, message: str, process: str):
        super().__init__(message)
        self.process = process
        """Its name."""
        self.brief = message.partition("\n")[0]
        """How it ended and where its log is, in one line."""


@dataclass(frozen=True)
class TrainerSpec:
    """The trainer to start."""

    run_dir: Path
    model: ModelConfig
    payload: dict[str, Any]
    """What the trainer's process reads as its config (JSON)."""
    num_processes: int
    """Ranks."""
    threads: int = 1
    """Threads that each of them computes with on the CPU."""
    gpus: tuple[Gpus, ...] = ()
    """Those that each rank sees; none = all compute on the CPU."""


@dataclass(frozen=True)
class Bundle:
    """The resources of one process of a run on its machine."""

    process: str
    """Its name."""
    model: ModelConfig | None
    """What it loads; None = it is a worker of an env, which starts it itself."""
    cpus: int
    gpus: int
    room: int = 0
    """Bytes of memory for files of weights."""
    host: str | None = None
    """Where an engine listens; None = it is a rank of the trainer."""

    @property
    def resources(self) -> dict[str, int]:
        """Return what it takes, by Ray's names."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def in_words(bundles: Sequence[Bundle]) -> str:
    """Return what processes take: `2 x engine of 1 CPU and 1 GPU, 1 x trainer of 1 CPU and 1 GPU`."""
    alike = Counter((bundle.process.split()[0], amounts(bundle.resources)) for bundle in bundles)
    return ", ".join(f"{count} x {process} of {size}" for (process, size), count in alike.items())


def worker_name(env: str, number: int) -> str:
    """Name of a worker of an env among the processes of a run."""
    return f"{env}-worker {number}"


def amounts(resources: Mapping[str, float]) -> str:
    """Cores and GPUs among Ray's resources, in words."""
    return " and ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)) or "nothing"


class Launcher(ABC):
    """Starts the processes of a run, watches them, and leaves none behind.

    A context manager: leaving it stops them all. Every process that it starts ends with the launcher's own process,
    however that one ends.
    """

    submits: ClassVar[bool] = False
    """Whether it hands the run to a queue in place of starting it: it has `submit` and `in_job`, and starts nothing."""
    places_processes: ClassVar[bool] = False
    """Whether it chooses machines and GPUs by itself; else a process has those of this machine that its spec names."""

    def reserve(self, bundles: Sequence[Bundle]) -> None:  # noqa: B027
        """Reserve the resources of the processes before one is started. Raises ConfigError if they are missing."""

    @abstractmethod
    def start_engine(self, spec: EngineSpec) -> str:
        """Start a model server and return its base URL, before it is ready. Raises PrlError if it cannot start."""

    @abstractmethod
    def start_trainer(self, spec: TrainerSpec) -> None:
        """Start the trainer's ranks. They end by themselves after the last step."""

    @abstractmethod
    def ensure_alive(self) -> None:
        """Raise ProcessDied, with the process's name and last log lines, if one has ended too early."""

    def transport(self, run_dir: Path, weights: Weights) -> FileTransport:
        """Return the way from this process to the trainer, by which `weights` send their messages too."""
        return FileTransport(run_dir)

    def place_of_worker(self, env: str, number: int) -> Any:
        """The reserved place where Ray starts the actor of an env's worker. Raises ConfigError."""
        raise ConfigError(f"envs.{env}.workers.where=ray: choose launcher=ray as well, or where=local")

    def restart_engine(self, name: str) -> str | None:
        """Start a model server again, by its process's name. Returns its base URL; None if that is not possible."""
        return None

    async def watch(self) -> None:
        """Run until a process ends too early, and raise ProcessDied then."""
        while True:
            self.ensure_alive()
            await asyncio.sleep(POLL_S)

    async def wait_until(self, done: Callable[[], bool], timeout_s: float, problem: str = "no end of training") -> None:
        """Wait until `done`. Raises ProcessDied if a process ends too early, PrlError (`problem`) at the deadline."""
        try:
            async with asyncio.timeout(timeout_s):
                while not done():
                    self.ensure_alive()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise PrlError(f"{problem} within {timeout_s:g} s") from None

    @abstractmethod
    async def finish(self, timeout_s: float) -> None:
        """Wait for the trainer to end by itself. Raises PrlError if it fails or takes longer than `timeout_s`.

        Nobody asks the engines any more: they may be ended meanwhile.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop every process that still runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
