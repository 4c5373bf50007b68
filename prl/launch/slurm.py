"""The launcher for a Slurm job: its first node as `local` has it, every further process a step of `srun`'s.

Outside a job it starts nothing: `prl.submit` hands the run over. In one, the orchestrator is in the batch script's
process tree on the first node. So are engines and ranks that are placed there (`placement.py`), as children of it: they
need no step of their own for the job's cores and GPUs. Each process on another node is one step of one task, whose
reaper there hears the launcher through srun's standard input.
"""

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from prl import reaper
from prl.config.hardware import MachineConfig, assuming
from prl.errors import ConfigError, PrlError
from prl.launch.launcher import EngineSpec, TrainerSpec
from prl.launch.local import LocalLauncher
from prl.launch.node import GPUS
from prl.launch.placement import Place, Placement, placed, visible_devices
from prl.launch.processes import Condition, Process
from prl.scratch import MARK, Scratch
from prl.trainer.config import MEETING_VARIABLE

FOLDER = "slurm"
"""Folder of a run directory with the script, the output of its jobs, and the file at which ranks meet."""
EVERYWHERE = ("0.0.0.0", "::")
DEAF = ("sh", "-c", 'trap "" TERM; exec "$@"', "sh")
"""Slurm sends SIGTERM to all processes of a job that it ends. The orchestrator has then a last checkpoint written, for
which the ranks of the trainer must not end first."""
ANSWER_S = 60.0
"""Deadline for Slurm's controller to answer, seconds."""
OPENED = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables of `LOOPBACK` that name the interface where processes of several nodes find each other."""


@dataclass(kw_only=True)
class SlurmLauncher(LocalLauncher):
    """Submits the run as a Slurm job, which goes on from its last checkpoint where it is requeued (`prl.submit`)."""

    partition: str | None = None
    """Partition; null = Slurm's default."""
    account: str | None = None
    """Account that the job is charged to; null = the user's default."""
    nodes: Annotated[int, Ge(1)] = 1
    """Nodes. Orchestrator and engines are on the first, as far as its GPUs reach; ranks of the trainer on all."""
    gpus_per_node: Annotated[int, Ge(0)] = 0
    """GPUs on each node; 0 = none."""
    cpus_per_task: Annotated[int, Ge(1)] = 4
    """Cores on each node."""
    time: str | None = None
    """Time limit as Slurm has it: minutes, or 1-12:00:00; null = the partition's."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch, added as +launcher.sbatch.qos=high; true for one without a value."""
    requeue: bool = True
    """Go on as the same job where it is preempted or its time is up, if that time has left a checkpoint."""
    interface: str | None = None
    """Network interface on which the ranks of several nodes, and engines to which weights are sent, connect to each
    other, without a token: eth0, ib0."""
    engine_gpus: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    """GPUs that each engine spans, by process."""
    ranks: int = field(default=0, init=False, repr=False)
    """Of the trainer."""
    hosts: list[str] = field(default_factory=list, init=False, repr=False)
    """The job's nodes by name, the orchestrator's first."""
    assumed: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False, repr=False)
    """What is taken for the machine's: the job's GPUs, and outside of it its cores."""
    met: list[Path] = field(default_factory=list, init=False, repr=False)
    """The file at which ranks of several nodes meet."""

    def check(self, where: str) -> None:
        for name in ("partition", "account", "time", "interface"):
            check_word(getattr(self, name), f"{where}.{name}")

    @property
    def hands_over(self) -> bool:  # type: ignore[override]
        """Whether this process is outside a job. In the shell of `salloc` it is, too, unless that is on a node."""
        return not (os.environ.get("SLURM_JOB_ID") and os.environ.get("SLURMD_NODENAME"))

    def __enter__(self) -> "SlurmLauncher":
        self.assumed.enter_context(assuming(self.machine()))
        return self

    def machine(self) -> MachineConfig:
        """What is to be taken for the machine's."""
        gpus = self.nodes * self.gpus_per_node
        if not self.hands_over:
            return MachineConfig(gpus=gpus)
        return MachineConfig(gpus=gpus, cores=self.cpus_per_task, ram_gb=math.inf)  # of their memory nothing is known

    def __exit__(self, *error: object) -> None:
        self.assumed.close()
        super().__exit__(*error)

    # --- where processes run ------------------------------------------------------------------------------------------

    def plan(self, engines: Sequence[EngineSpec], trainer: TrainerSpec | None) -> Placement:
        """Take further engines and the trainer into account; return where all of them are. Raises ConfigError."""
        self.engine_gpus |= {
            each.process: each.config.tensor_parallel_size if each.device == "cuda" else 0 for each in engines
        }
        self.ranks = self.ranks if trainer is None else trainer.num_processes
        if not self.hands_over and not self.hosts:
            self.hosts = allocated()
        nodes = len(self.hosts) or self.nodes
        found = placed(nodes, self.gpus_per_node, list(self.engine_gpus.values()), self.ranks)
        for spec in engines:
            node = found.engines[list(self.engine_gpus).index(spec.process)].node
            if node and spec.config.host not in EVERYWHERE:
                key = "teacher.inference.host" if spec.frozen else "inference.host"
                raise ConfigError(
                    f"{key}={spec.config.host}: engine {spec.process!r} comes to node {node + 1}, where the "
                    f"orchestrator does not reach that: write {key}=0.0.0.0, and it listens at every address of its "
                    "node, where the run's token guards it"
                )
        if found.rank_nodes > 1 and self.interface is None:
            raise ConfigError(
                f"launcher.nodes={nodes}: the trainer's ranks are on {found.rank_nodes} nodes, and what they send each "
                "other has no token: name the network interface that they may use, launcher.interface=<name> "
                "(ip -br address lists them)"
            )
        return found

    def place(self, name: str) -> Place:
        """Where a process of the run is, by its name; the first node for what is not placed."""
        found = self.plan([], None)
        if name in self.engine_gpus:
            return found.engines[list(self.engine_gpus).index(name)]
        role, _, rank = name.partition(" rank ")
        return found.ranks[int(rank or 0)] if role == "trainer" and found.ranks else Place(0)

    def import_ahead(self, engines: Sequence[EngineSpec], trainer: TrainerSpec | None) -> None:
        self.plan(engines, trainer)
        if not self.hands_over:
            super().import_ahead([replace(each, gpus=()) for each in engines], trainer and replace(trainer, gpus=()))

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, name: str, command: list[str], *, env: dict[str, str], log: Path) -> Process:
        if self.hands_over:
            raise ConfigError(
                "launcher=slurm: prl train alone submits a job: leave it out, or give this command inside one"
            )
        node, gpus = self.place(name)
        command = [*DEAF, *command] if name.startswith("trainer") else command
        env = env | self.opened
        if node == 0:
            return super().start(name, command, env=env | shown(gpus), log=log)
        self.scratch = self.scratch or Scratch()
        env = env | ({GPUS: ",".join(map(str, gpus))} if gpus else {})
        self.processes.append(step := Step(self.hosts[node], name, command, env, log, self.scratch))
        return step

    def stand_by(self, name: str, command: list[str], *, env: dict[str, str]) -> None:
        node, gpus = self.place(name)
        command = [*DEAF, *command] if name.startswith("trainer") else command
        if node == 0:  # on another it imports once it is started
            super().stand_by(name, command, env=env | self.opened | shown(gpus))

    @property
    def opened(self) -> dict[str, str]:
        """What names the network interface to processes of a job with several nodes."""
        return dict.fromkeys(OPENED, self.interface) if self.interface and len(self.hosts) > 1 else {}

    def start_engine(self, spec: EngineSpec) -> str:
        node = self.plan([spec], None).engines[list(self.engine_gpus).index(spec.process)].node
        url = super().start_engine(replace(spec, gpus=()))  # which it sees, `start` says
        return f"http://{self.hosts[node]}:{self.engines[spec.process][1]}" if node else url

    def start_trainer(self, spec: TrainerSpec) -> None:
        if self.plan([], spec).rank_nodes > 1:
            (spec.run_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)
        super().start_trainer(replace(spec, gpus=()))

    def _ranks(self, spec: TrainerSpec) -> dict[str, dict[str, str]]:
        found, places = super()._ranks(spec), self.plan([], spec)
        if places.rank_nodes > 1:
            # A file, not a TCP store: that would listen on every interface of the first node and ask nobody who it is.
            # Batches and weights need a folder that all nodes see anyway; this one is for the user alone.
            self.met = self.met or [spec.run_dir.resolve() / FOLDER / f"ranks-{secrets.token_hex(4)}"]
            found = {name: env | {MEETING_VARIABLE: str(self.met[0])} for name, env in found.items()}
        # A rank that has GPUs sees no others.
        return {
            name: env | ({"LOCAL_RANK": "0"} if place.gpus else {})
            for (name, env), place in zip(found.items(), places.ranks, strict=True)
        }

    def conditions(self) -> list[Condition]:
        """Of the processes on this node: what those on others are doing is not known here."""
        steps = {each.name for each in self.processes if isinstance(each, Step)}
        return [condition for condition in super().conditions() if condition.name not in steps]

    def stop(self) -> None:
        for process in [*self.processes, *self.standby.values()]:
            if process.command[: len(DEAF)] == list(DEAF):  # it would not hear that it is asked
                process.end()
        super().stop()
        for path in self.met:
            path.unlink(missing_ok=True)


class Step(Process):
    """A process on another node: its command under `prl.launch.node`, started by srun, which leads its group here."""

    def __init__(self, host: str, *args: Any):
        self.host = host
        super().__init__(*args)

    def arguments(self) -> list[str]:
        options = ("overlap", "nodes=1", "ntasks=1", f"nodelist={self.host}", "export=ALL", "quiet")
        name = self.name.replace(" ", "-")
        srun = ["srun", *(f"--{option}" for option in options), f"--job-name={name}"]
        return [*srun, sys.executable, "-m", "prl.launch.node", *self.command]

    def environment(self, scratch: Scratch) -> dict[str, str]:
        return {**os.environ, MARK: str(scratch.path)}  # the folder itself is not there

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


def shown(gpus: Sequence[int]) -> dict[str, str]:
    """Environment of a process on this node that is to see these of the job's GPUs."""
    return {"CUDA_VISIBLE_DEVICES": visible_devices(gpus, os.environ)} if gpus else {}


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


def check_word(value: str | None, where: str) -> None:
    """Raise ConfigError for what is no one word of a line of the script."""
    if value is not None and (not value or not value.isprintable() or set(value) & set(" \"'\\")):
        raise ConfigError(f"{where}={value[:80]!r} must be one word, without quotes")
