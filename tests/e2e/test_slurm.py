"""Runs as jobs of a real Slurm, whose nodes are all this machine: started again, and ended."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from slurm_cluster import cluster

from prl.scratch import MARK

pytestmark = pytest.mark.engine
BRIEF = ("orchestrator.batch_size=32", "orchestrator.eval.every=null", "checkpoint.every_minutes=null")


@pytest.fixture
def slurm(tmp_path):
    with cluster(tmp_path / "slurm", nodes=2) as env:
        yield env


class Job:
    """A submitted run."""

    def __init__(self, argv, env, run_dir):
        done = subprocess.run(argv, env=env, cwd=run_dir.parent, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        self.env, self.dir, self.said = env, run_dir, done.stderr
        self.number = done.stderr.partition("submitted as job ")[2].partition(":")[0]
        self.marks = {"SLURM_JOB_ID": self.number, "SLURM_CONF": env["SLURM_CONF"]}  # another cluster counts alike

    def slurm(self, *command):
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, check=True).stdout

    def field(self, name):
        shown = self.slurm("scontrol", "show", "job", self.number)
        return shown.partition(f" {name}=")[2].split()[0]

    def log(self):
        path = self.dir / "slurm" / f"{self.number}.log"
        return path.read_text() if path.exists() else "no output"

    def steps(self):
        path = self.dir / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, condition, timeout_s=300):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def processes(self):
        """Environment and command line of each process of the run that works in a folder for temporary files."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                environ = dict(each.split("=", 1) for each in (path / "environ").read_text().split("\0") if "=" in each)
                words = (path / "cmdline").read_text().split("\0")
            except OSError:  # it has ended
                continue
            own = all(environ.get(name) == value for name, value in self.marks.items())
            if MARK in environ and own and words != [""]:
                found[int(path.name)] = environ, words
        return found


def nodes_of(processes, word):
    return {environ["SLURMD_NODENAME"] for environ, words in processes.values() if word in words[:4]}


def test_two_ranks_on_two_nodes_go_on_from_the_last_checkpoint_of_a_job_whose_time_is_up(
    command, slurm, tmp_path, gone
):
    ranks = (
        "trainer.num_processes=2",
        "launcher.nodes=2",
        "launcher.interface=lo",
        "launcher.cpus_per_task=2",
    )
    argv, env = command("launcher=slurm", *ranks, *BRIEF, "max_steps=40", "+launcher.sbatch.comment='a b'")
    run_dir = tmp_path / "run"
    job = Job(argv, env | {name: slurm[name] for name in ("SLURM_CONF", "PATH")}, run_dir)
    job.wait(lambda: len(job.steps()) > 3)
    found = job.processes()
    assert nodes_of(found, "prl.trainer") == {"node1", "node2"}
    assert len({environ[MARK] for environ, words in found.values() if "prl.trainer" in words[:4]}) == 2, "one per node"
    told = [*(" ".join(words) for _, words in found.values()), (run_dir / "slurm" / "job.sh").read_text()]
    assert not any(env["PRL_TOKEN"] in text for text in told)
    job.slurm("scancel", "--batch", "--signal=USR1", job.number)  # as Slurm does before the time is up
    job.wait(lambda: job.field("JobState") in ("COMPLETED", "FAILED", "CANCELLED"))
    assert (job.field("JobState"), job.field("Restarts")) == ("COMPLETED", "1"), job.log()
    assert "Comment=a b" in job.slurm("scontrol", "show", "job", job.number)
    [resumed] = [json.loads(line) for line in (run_dir / "resumes.jsonl").read_text().splitlines()]
    assert 3 <= resumed["step"] < 40, "no checkpoint but the last one"
    assert job.steps() == list(range(41))
    assert json.loads((run_dir / "result.json").read_text())["status"] == "completed"
    assert sorted(path.name for path in (run_dir / "slurm").iterdir()) == [f"{job.number}.log", "job.sh"]
    assert all(map(gone, found))
    assert not any(Path(environ[MARK]).exists() for environ, _ in found.values())


def test_a_cancelled_job_has_a_last_checkpoint_and_leaves_nothing(command, slurm, tmp_path, gone):
    argv, env = command("launcher=slurm", "launcher.cpus_per_task=2", *BRIEF, "max_steps=10000")
    argv = [argument for argument in argv if not argument.startswith("inference.urls=")]
    job = Job(argv, env | {name: slurm[name] for name in ("SLURM_CONF", "PATH")}, tmp_path / "run")
    job.wait(lambda: len(job.steps()) > 3)
    found = job.processes()
    assert nodes_of(found, "prl.inference.server") == nodes_of(found, "prl.trainer") == {"node1"}
    job.slurm("scancel", job.number)
    job.wait(lambda: not job.slurm("squeue", "-h"))
    assert job.field("JobState") == "CANCELLED"
    job.wait(lambda: all(map(gone, found)), 10)
    assert not any(Path(environ[MARK]).exists() for environ, _ in found.values())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "stopped" and result["steps"] >= 3
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("step_*/manifest.json")
    assert int(checkpoint.parent.name.removeprefix("step_")) >= result["steps"]
