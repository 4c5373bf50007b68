"""The launcher for a Slurm job: its first node as `local` has it, every further process a step of `srun`'s.

Outside a job it starts nothing: `prl.submit` hands the run over. In one, the orchestrator is in the batch script's
process tree on the first node. So are engines and ranks that are placed there, as children of it: they
need no step of their own for the job's cores and GPUs. Each process on another node is one step of one task, whose
reaper there hears the launcher through srun's standard input.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from prl import reaper
from prl.config.gpus import HERE, Place
from prl.config.hardware import MachineConfig
from prl.errors import ConfigError, PrlError
from prl.launch.launcher import EngineSpec, TrainerSpec
from prl.launch.node import GPUS
from prl.launch.nodes import NodesLauncher, check_word
from prl.launch.processes import Child, Process
from prl.scratch import MARK, Scratch

FOLDER = "slurm"
"""Folder of a run directory with the script, the output of its jobs, and the file at which ranks meet."""
DEAF = ("sh", "-c", 'trap "" TERM; exec "$@"', "sh")
"""Slurm sends SIGTERM to all processes of a job that it ends. The orchestrator has then a last checkpoint written, for
which the ranks of the trainer must not end first."""
ANSWER_S = 60.0
"""Deadline for Slurm's controller to answer, seconds."""


@dataclass(kw_only=True)
class SlurmLauncher(NodesLauncher):
    """Submits the run as a Slurm job, which goes on from its last checkpoint where it is requeued (`prl.submit`)."""

    FOLDER: ClassVar[str] = FOLDER
    partition: str | None = None
    """Partition; null = Slurm's default."""
    account: str | None = None
    """Account that the job is charged to; null = the user's default."""
    cpus_per_task: Annotated[int, Ge(1)] = 4
    """Cores on each node."""
    time: str | None = None
    """Time limit as Slurm has it: minutes, or 1-12:00:00; null = the partition's."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch, added as +launcher.sbatch.qos=high; true for one without a value."""
    requeue: bool = True
    """Go on as the same job where it is preempted or its time is up, if that time has left a checkpoint."""
    hosts: list[str] = field(default_factory=list, init=False, repr=False)
    """The job's nodes by name, the orchestrator's first."""

    def check(self, where: str) -> None:
        super().check(where)
        for name in ("partition", "account", "time"):
            check_word(getattr(self, name), f"{where}.{name}")

    @property
    def hands_over(self) -> bool:  # type: ignore[override]
        """Whether this process is outside a job. In the shell of `salloc` it is, too, unless that is on a node."""
        return not (os.environ.get("SLURM_JOB_ID") and os.environ.get("SLURMD_NODENAME"))

    def machine(self) -> MachineConfig:
        found = super().machine()
        if self.hands_over:  # of the nodes' memory nothing is known
            found.cores, found.ram_gb = self.cpus_per_task, math.inf
        return found

    def address(self, node: int) -> str:
        return self.hosts[node]

    def import_ahead(self, engines: Sequence[EngineSpec], trainer: TrainerSpec | None) -> None:
        if not self.hands_over:
            super().import_ahead(engines, trainer)

    def start(self, name: str, command: list[str], *, env: dict[str, str], log: Path, place: Place = HERE) -> Process:
        if self.hands_over:
            raise ConfigError(
                "launcher=slurm: prl train alone submits a job: leave it out, or give this command inside one"
            )
        return super().start(name, deaf(name, command), env=env, log=log, place=place)

    def stand_by(self, name: str, command: list[str], *, env: dict[str, str], place: Place = HERE) -> None:
        super().stand_by(name, deaf(name, command), env=env, place=place)

    def elsewhere(self, place: Place, name: str, command: list[str], env: dict[str, str], log: Path) -> Process:
        self.scratch = self.scratch or Scratch()
        self.hosts = self.hosts or allocated()
        if place.node >= len(self.hosts):
            raise ConfigError(f"launcher.nodes={self.nodes}, and this job has {len(self.hosts)}")
        env = env | ({GPUS: ",".join(map(str, place.gpus))} if place.gpus else {})
        return Step(self.hosts[place.node], name, command, env, log, self.scratch)

    def stop(self) -> None:
        for process in [*self.processes, *self.standby.values()]:
            if process.command[: len(DEAF)] == list(DEAF):  # it would not hear that it is asked
                process.end()
        super().stop()


def deaf(name: str, command: list[str]) -> list[str]:
    """The command of a process as it runs in a job."""
    return [*DEAF, *command] if name.startswith("trainer") else command


class Step(Child):
    """A process on another node: its command under `prl.launch.node`, started by srun, which leads its group here."""

    def __init__(self, host: str, *args: Any):
        self.host = host
        self.where = f" on {host}"
        super().__init__(*args)

    def arguments(self) -> list[str]:
        options = ("overlap", "nodes=1", "ntasks=1", f"nodelist={self.host}", "export=ALL", "quiet")
        name = self.name.replace(" ", "-")
        srun = ["srun", *(f"--{option}" for option in options), f"--job-name={name}"]
        return [*srun, sys.executable, "-m", "prl.launch.node", *self.command]

    def environment(self, scratch: Scratch) -> dict[str, str]:
        return {**os.environ, MARK: str(scratch.path)}  # the folder itself is not there

    def condition(self) -> None:
        """What is not on this node is not known."""

    def ask(self) -> None:
        """Have the reaper hear that its launcher is done. A signal would have srun kill the step."""
        assert self.stdin is not None
        if self.status is None and not self.stdin.closed:
            self.stdin.close()

    def end(self) -> None:
        if self.returncode is not None:
            return
        assert self.stdin is not None
        if self.status is None and not self.stdin.closed:
            self._tell()
        deadline = time.monotonic() + reaper.GRACE_S
        while self.status is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.status is None:
            os.killpg(self.pid, signal.SIGTERM)  # srun has Slurm kill the step
        while self.status is None and time.monotonic() < deadline + reaper.GRACE_S:
            time.sleep(0.01)
        os.killpg(self.pid, signal.SIGKILL)
        self.communicate()

    def _tell(self) -> None:
        """Have the reaper kill all that descends from it."""
        assert self.stdin is not None
        try:
            self.stdin.write(b"k")
            self.stdin.flush()
        except OSError:  # srun has ended
            pass


def allocated() -> list[str]:
    """The nodes of the job that this process is in, by name, its own first. Raises PrlError."""
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
            capture_output=True,
            text=True,
            check=True,
            timeout=ANSWER_S,
        ).stdout.split()
    except (OSError, KeyError, subprocess.SubprocessError) as error:
        raise PrlError(f"launcher=slurm: which nodes this job has cannot be found out: {error}") from error
    own = os.environ["SLURMD_NODENAME"]
    return sorted(listed, key=lambda name: name != own)
