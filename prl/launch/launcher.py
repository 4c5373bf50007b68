"""The interface of a launcher, which starts, watches and stops the processes of a run."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from prl.base.errors import ConfigError, PrlError
from prl.config.hardware import MachineConfig
from prl.config.schema import TrainRunConfig
from prl.engines.base import EngineSpec
from prl.launch.plan import Bundle, RunPlan, TrainerSpec
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
        """The end of the process and the place of its log, in one line."""


class Launcher(ABC):
    """Starts the processes of a run, watches them, and leaves none behind.

    A context manager: leaving it stops them all. Every process that it starts ends with the launcher's own process,
    however that one ends.
    """

    submits: ClassVar[bool] = False
    """It hands the run to a queue in place of starting it, by `submit`."""
    places_processes: ClassVar[bool] = False
    """It chooses machines and GPUs by itself; else a process has those of this machine that its spec names."""

    def machine(self, described: MachineConfig) -> MachineConfig:
        """Return what is known of the machine that the run gets, where the config has `described` it."""
        return described

    def check_plan(self, plan: RunPlan) -> None:
        """Raise ConfigError for a run whose processes it cannot start."""
        if self.places_processes and not plan.policy.is_server:
            raise ConfigError("launcher=ray places processes, and engine=transformers has none: choose engine=default")
        if self.places_processes and plan.keeps_engines:
            raise ConfigError(
                "sweep.share_engine keeps engines of one process for the next run: not those of launcher=ray"
            )

    def reserve(self, bundles: Sequence[Bundle]) -> None:  # noqa: B027
        """Reserve the resources of the processes before one is started. Raises ConfigError if they are missing."""

    def submit(self, run: TrainRunConfig, grace_s: float, arguments: Sequence[str]) -> None:
        """Hand a checked run to a queue, in place of starting it, where the launcher `submits`. Raises ConfigError.

        Args:
            run: The name and directory of the run.
            grace_s: The time for its last checkpoint, seconds.
            arguments: The arguments of the command, as they were typed.
        """
        raise PrlError(f"{type(self).__name__} has no queue")

    def start_engine(self, spec: EngineSpec) -> str:
        """Start a model server and return its base URL, before it is ready. Raises PrlError if it cannot start."""
        raise PrlError(f"{type(self).__name__} starts no server")

    def warm_trainer(self, spec: TrainerSpec) -> None:  # noqa: B027
        """Start the processes of the trainer before its config is whole: their imports take seconds.

        What `start_trainer` is given later differs in `payload` alone.
        """

    def start_trainer(self, spec: TrainerSpec) -> None:
        """Start the trainer's ranks, or go on with those that are warm. They end by themselves after the last step."""
        raise PrlError(f"{type(self).__name__} starts no trainer")

    def ensure_alive(self) -> None:  # noqa: B027
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

    async def finish(self, timeout_s: float) -> None:  # noqa: B027
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
