"""Sweeps of real runs: every launcher, the sweeper that searches, and engines that stay warm between jobs."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from ray_nodes import ray_nodes

pytestmark = pytest.mark.slow

SLURM_HERE = Path(__file__).parents[2] / "scripts" / "slurm_here"
ON_RAY = ("sweep=ray", "hydra.launcher.ray.remote.num_cpus=1")
START_S = 300
"""[s] Deadline for a sweep to train: Ray on a busy machine took 110 s to come up."""
TINY = ("max_steps=1", "orchestrator.batch_size=16", "orchestrator.eval.num_tasks=4", "checkpoint.every_minutes=null")


def sweep_of(argv, env):
    """The command of a sweep, from that of a run."""
    return [*(arg for arg in argv if not arg.startswith("run.dir=")), "-m"], env


@pytest.fixture
def sweep(inline_command, tmp_path):
    """Run a sweep, of which each job is one process or one after another in the same."""

    def run(*overrides, below=(), variables=(), timeout=300):
        argv, env = sweep_of(*inline_command(*TINY, *overrides))
        env |= variables
        done = subprocess.run([*below, *argv], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=timeout)
        folders = list(tmp_path.glob("outputs/*"))
        assert len(folders) == 1, done.stderr
        return done, folders[0]

    return run


def results(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))}


def test_search_in_processes_is_reproducible(sweep):
    search = ("sweep=[lr_search,joblib]", "hydra.sweeper.n_trials=2", "seed=0,1")
    done, folder = sweep(*search)
    assert done.returncode == 0, done.stderr
    found = results(folder)
    assert len(found) == 4 and all(
        result["status"] == "completed" and result["steps"] == 1 for result in found.values()
    )
    assert all(f"job {name}: reward" in done.stderr for name in found)
    assert done.stderr.count("completed  ") == 4, "the table"
    by_rate = {}
    for name, result in found.items():
        by_rate.setdefault(name.split("trainer.optim.lr=")[1], []).append(result["optimized_metric"])
    means = {rate: sum(rewards) / 2 for rate, rewards in by_rate.items()}
    best = OmegaConf.load(folder / "optimization_results.yaml")
    assert (
        best.best_value
        == pytest.approx(max(means.values()))
        == pytest.approx(means[str(best.best_params["trainer.optim.lr"])])
    )
    assert "2 seeds.\nlook at: " in done.stderr, "the verdict"
    again, same = sweep(*search)
    assert again.returncode == 0 and same == folder, again.stderr
    assert again.stderr.count("completed already: skipped") == 4 and results(folder) == found
    assert OmegaConf.load(folder / "optimization_results.yaml") == best


def test_settings_that_belong_together_vary_together(sweep, tmp_path):
    """An algorithm with its rate is an arm."""
    for algo, rate in (("grpo", 0.002), ("max_rl", 0.001)):
        path = tmp_path / "mine" / "arm" / f"{algo}-rate.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ("# @package _global_", "defaults:", f"  - override /algo: {algo}", "model:", f"  lr: {rate}")
        path.write_text("\n".join(lines))
    done, folder = sweep("arm=grpo-rate,max_rl-rate", "--config-dir", str(tmp_path / "mine"))
    assert done.returncode == 0, done.stderr
    configs = {path.parent.name: OmegaConf.load(path) for path in folder.glob("*/config.yaml")}
    assert {name: (each.algo._target_, each.trainer.optim.lr) for name, each in configs.items()} == {
        "arm=grpo-rate": ("prl.algorithms.grpo.GRPOAlgorithm", 0.002),
        "arm=max_rl-rate": ("prl.algorithms.max_rl.MaxRLAlgorithm", 0.001),
    }


def run_jobs_twice(sweep, *launcher, **how):
    """Three jobs, of which one is refused: the second command skips the others."""
    jobs = (*launcher, "trainer.optim.lr=1e-3,2e-3,-1")
    done, folder = sweep(*jobs, **how)
    found = results(folder)
    assert done.returncode == 1, done.stderr
    assert [result["status"] for result in found.values()] == ["refused", "completed", "completed"]
    assert len({path.read_text() for path in folder.glob("*/run.holder")}) == 2, "a process for each"
    table = done.stderr.split("sweep: ")[1]
    assert table.count("  completed  ") == 2 and "trainer.optim.lr=-1: " in table
    again, same = sweep(*jobs, **how)
    assert again.returncode == 1 and same == folder, again.stderr
    assert [result for result in results(folder).values() if result["status"] == "completed"] == list(found.values())[
        1:
    ]
    assert [path.name for path in (folder / "earlier").iterdir()] == ["trainer.optim.lr=-1.failed-1"]


def test_jobs_run_on_the_nodes_of_a_ray_cluster(sweep):
    with ray_nodes() as nodes:  # they begin in another directory
        nodes.add("head", 1)
        nodes.add("other", 1)
        run_jobs_twice(sweep, *ON_RAY, variables=nodes.environment)


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed")
def test_jobs_run_on_slurm(sweep):
    run_jobs_twice(sweep, "sweep=slurm", below=[SLURM_HERE])


def descendants(pid):
    """Ids of a process's children, and theirs."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return [*found, *(each for child in found for each in descendants(child))]


@pytest.mark.parametrize(
    ("launcher", "number"), [((), signal.SIGINT), (ON_RAY, signal.SIGINT), (ON_RAY, signal.SIGTERM)], ids=str
)
def test_a_signal_stops_the_sweep_and_leaves_no_process(inline_command, tmp_path, gone, launcher, number):
    argv, env = inline_command(
        *launcher, "seed=0,1", "max_steps=500", "launcher=local", "orchestrator.eval.every=null", "run.name=s"
    )
    argv, env = sweep_of(argv, env)
    sweep = subprocess.Popen(argv, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + START_S
    while not any(path.read_text().count("\n") > 2 for path in tmp_path.glob("outputs/s/*/metrics.jsonl")):
        assert sweep.poll() is None and time.monotonic() < deadline, sweep.stderr.read()
        time.sleep(0.1)
    family = descendants(sweep.pid)
    try:
        if number == signal.SIGINT:
            os.killpg(sweep.pid, number)  # as a terminal does
        else:
            sweep.send_signal(number)
        _, stderr = sweep.communicate(timeout=200)
        assert sweep.returncode == 130, stderr
        table = stderr.split("sweep: ")[1]
        assert ("stopped" in table or launcher) and "completed" not in table and "running" not in table
        if not launcher:
            checkpoints = tmp_path.glob("outputs/s/*/checkpoints/step_*/manifest.json")
            assert list(checkpoints), "the job had its time of grace"
        deadline = time.monotonic() + 60
        while not all(map(gone, family)):
            assert time.monotonic() < deadline, [pid for pid in family if not gone(pid)]
            time.sleep(0.1)
    finally:
        for pid in (sweep.pid, *family):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.engine
def test_jobs_share_a_warm_engine(train, command, exchanges, tmp_path):
    """Each begins from the base weights; its seed gives it the tasks and replies that it would have alone."""
    fixed = (*TINY, "experiment=on_policy")
    argv, env = command(*fixed, "seed=7,8", "run.name=s")
    argv = [arg for arg in sweep_of(argv, env)[0] if not arg.startswith("engine.urls=")]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs" / "s"
    assert len(list((folder / "engines").glob("engine-*.log"))) == 1
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*/metrics.jsonl")]
    assert [line["logprob_gap/mean"] < 1e-5 for run in lines for line in run[1:]] == [True, True]
    seven, eight = folder / "seed=7", folder / "seed=8"
    assert [OmegaConf.load(job / "config.yaml").seed for job in (seven, eight)] == [7, 8]
    alone = train(*fixed, "seed=8")  # not the second job of its process: what the first one left would show
    assert alone.status == 0, alone.stderr
    assert exchanges(alone.dir) == exchanges(eight) != exchanges(seven)
    assert {prompt for _, prompt, _ in exchanges(seven)} != {prompt for _, prompt, _ in exchanges(eight)}
