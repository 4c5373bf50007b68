"""A run as a Slurm job over two nodes of this machine, each with an address and processes of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_processes import family, wait_until

pytestmark = [
    *(pytest.mark.engine, pytest.mark.slow),
    pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed"),
]

SLURM_HERE = Path(__file__).parents[2] / "scripts" / "slurm_here"
JOB = ("launcher=slurm", "launcher.nodes=2", "launcher.cpus_per_task=2", "weights=ray", "engine.host=0.0.0.0")
SMALL = ("engine.servers=2", "trainer.num_processes=2", "max_steps=4", "orchestrator.batch_size=32")
QUIET = ("orchestrator.eval.every=null", "monitor.console.mode=plain")
START_S, END_S = 240, 120
"""[s] Deadlines for a job to train, with two engines that start on this machine, and for one to end."""


@pytest.fixture
def slurm():
    """The process of a Slurm of two nodes, and the environment in which its commands find it."""
    command = [str(SLURM_HERE), "--nodes", "2", "sh", "-c", 'echo "$SLURM_CONF" && exec sleep 3600']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process, os.environ | {"SLURM_CONF": process.stdout.readline().strip(), "OMP_NUM_THREADS": "1"}
        process.terminate()


def test_a_requeued_job_goes_on_with_each_step_once(slurm, tmp_path):
    daemons, env = slurm
    folder = tmp_path / "runs" / "one"

    def answer(*command):
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def steps():
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")][1:]  # less step 0

    train = (sys.executable, "-m", "prl.train", *JOB, *SMALL, *QUIET, f"run.dir={folder}")
    shown = answer(*train)
    job = shown.partition("job ")[2].partition(",")[0]
    log = folder.parent / f"one.slurm-{job}.log"
    assert f", log: {log}\n" in shown and f"run directory: {folder}" in shown

    def trained(count):
        assert job in answer("squeue", "-ho", "%i"), log.read_text()
        return len(steps()) >= count

    wait_until(lambda: trained(1), START_S, log.read_text, 1)
    answer("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit
    wait_until(lambda: "Restarts=1" in answer("scontrol", "show", "job", job), END_S, log.read_text, 1)
    wait_until(lambda: job not in answer("squeue", "-ho", "%i"), START_S + END_S, log.read_text, 1)

    assert [line["step"] for line in steps()] == [1, 2, 3, 4], log.read_text()
    assert "going on after step" in log.read_text()
    assert steps()[0]["logprob_gap/mean"] < 1e-5, "the engines' logprobs are the trainer's"
    assert "JobState=COMPLETED" in answer("scontrol", "show", "job", job)
    left = [line for line in family(daemons.pid).values() if "ray" in line or "prl." in line]
    assert not left
    refused = subprocess.run(train, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2 and "already holds a run" in refused.stderr
    assert not answer("squeue", "-h")
