"""The launcher for Slurm: a job that starts Ray on its nodes, and in it the command that was typed, with `ray`."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from prl.base.errors import ConfigError
from prl.base.text import in_one_line
from prl.config.hardware import MachineConfig
from prl.config.run_yaml import quoted
from prl.config.schema import AUTO, TrainRunConfig
from prl.config.suggestions import override_key
from prl.launch.launcher import Launcher

END_S = 30
"""Time that Ray and the job have to end in after the run's last checkpoint, seconds."""
SCRIPT = Path(__file__).with_suffix(".sh")
"""Script that follows the lines of the job's own."""


@dataclass(kw_only=True)
class SlurmLauncher(Launcher):
    """Submits a job that starts Ray on its nodes and trains there, as with launcher=ray."""

    submits: ClassVar[bool] = True
    places_processes: ClassVar[bool] = True
    wait_s: Annotated[float, Gt(0)] = 300.0
    """Deadline for Ray to start on the nodes, and again for the resources of the run, seconds."""
    nodes: Annotated[int, Ge(1)] = 1
    """Nodes of the job."""
    partition: str | None = None
    """Partition; null = the cluster's default."""
    time_min: Annotated[int, Ge(1)] | None = None
    """Time limit, minutes; before it the run writes a checkpoint and the job is requeued. null = the partition's."""
    gpus_per_node: Annotated[int, Ge(1)] | None = None
    """GPUs on each node; null = none."""
    cpus_per_task: Annotated[int, Ge(1)] | None = None
    """Cores on each node; null = Slurm's default, usually one."""
    args: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Further options of sbatch, `+launcher.args.account=mine`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before Ray starts, `[module load cuda]`."""

    def machine(self, described: MachineConfig) -> MachineConfig:
        """As `Launcher.machine`: the job's nodes, as far as the options say what they have."""
        if described.gpus is not None or self.gpus_per_node is None:
            return described
        return replace(described, gpus=self.nodes * self.gpus_per_node)

    def submit(self, run: TrainRunConfig, grace_s: float, arguments: Sequence[str]) -> None:
        if not arguments:  # the command of a sweep would be the whole sweep in each of its jobs
            raise ConfigError("launcher=slurm submits the command of one run: for jobs of a sweep choose sweep=slurm")
        sbatch = shutil.which("sbatch")
        if sbatch is None:
            raise ConfigError("launcher=slurm: there is no sbatch here: submit from a machine of the cluster")
        if run.resume not in (None, AUTO):
            raise ConfigError("run.resume=<run>: launcher=slurm goes on with run.resume=auto and the run's run.dir")
        options = self.options(run, grace_s)
        if own := sorted(options.keys() & self.args):
            raise ConfigError(f"launcher.args.{own[0]}: the launcher sets that option of sbatch itself")
        given = {f"--{name}": value for name, value in (options | self.args).items() if value is not None}
        flags = [name if value is True else f"{name}={value}" for name, value in given.items()]
        Path(run.dir).parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sbatch, *flags], input=self.script(run, arguments), capture_output=True, text=True)
        if done.returncode != 0:
            raise ConfigError(f"launcher=slurm: {in_one_line(done.stderr)[-400:]}")
        job = done.stdout.partition(";")[0].strip()
        print(f"job {job}, log: {run.dir}.slurm-{job}.log\nrun directory: {run.dir}", file=sys.stderr)

    def stop(self) -> None:
        """Leave the job alone: nothing runs here."""

    def options(self, run: TrainRunConfig, grace_s: float) -> dict[str, Any]:
        """Return the job's options of sbatch by name; null = not given. Raises ConfigError for too short a time."""
        end_s = round(grace_s) + END_S
        if self.time_min is not None and 60 * self.time_min <= end_s:
            raise ConfigError(f"launcher.time_min={self.time_min}: checkpoint.grace_s and the end take {end_s} s")
        return {
            "parsable": True,
            "job-name": run.name,
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "partition": self.partition,
            "time": self.time_min,
            "gpus-per-node": self.gpus_per_node,
            "cpus-per-task": self.cpus_per_task,
            "output": f"{run.dir}.slurm-".replace("%", "%%") + "%j.log",
            "open-mode": "append",
            "requeue": True,
            "signal": f"B:USR1@{end_s}",
        }

    def script(self, run: TrainRunConfig, arguments: Sequence[str]) -> str:
        """Return the job's script."""
        fixed = {"run.dir": run.dir, "run.name": run.name, "run.resume": AUTO}
        kept = [each for each in arguments if override_key(each).partition(".")[0] != "launcher"]
        kept = [each for each in kept if override_key(each) not in fixed]
        own = ["launcher=ray", f"launcher.wait_s={self.wait_s:g}"]
        own += [f"{key}={quoted(value)}" for key, value in fixed.items()]
        lines = [
            "#!/bin/bash",
            "# Starts Ray on the nodes of this job and runs prl on the first one, where this script runs too.",
            *self.setup,
            f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
            f"wait_s={self.wait_s:.0f}",
            f"log={shlex.quote(f'{run.dir}.slurm-')}",
            f"command=({shlex.join([sys.executable, '-m', 'prl.train', *kept, *own])})",
        ]
        return "\n".join([*lines, SCRIPT.read_text(encoding="utf-8")])
