"""Sweeps of real runs: every launcher, the sweeper that searches, and engines that stay warm between jobs."""

import json
import subprocess

import pytest
from omegaconf import OmegaConf

pytestmark = pytest.mark.engine

TINY = ("max_steps=1", "orchestrator.batch_size=16", "orchestrator.eval.num_tasks=4", "trainer.checkpoint_every=null")


@pytest.fixture
def sweep(command, tmp_path):
    """Run a sweep on the shared engine; its jobs, which name that engine, take turns."""

    def run(*overrides, timeout=300):
        argv, env = command(*TINY, *overrides)
        argv = ["-m" if arg.startswith("run.dir=") else arg for arg in argv]
        done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=timeout)
        (folder,) = (tmp_path / "outputs").iterdir()
        return done, folder

    return run


def results(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))}


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_two_jobs_side_by_side_in_processes_of_their_own(sweep, launcher):
    done, folder = sweep(f"sweep={launcher}", "algo=grpo,max_rl")
    assert done.returncode == 0, done.stderr
    found = results(folder)
    assert list(found) == ["algo=grpo", "algo=max_rl"]
    assert all(result["status"] == "completed" and result["steps"] == 1 for result in found.values())
    assert all(0 <= result["optimized_metric"] <= 1 for result in found.values())
    assert all(f"job {name}: reward" in done.stderr for name in found) or launcher == "submitit_local"
    assert done.stderr.count("completed  ") == 2, "the table"


def test_a_search_is_reproducible_and_done_jobs_are_not_done_again(sweep):
    search = ("sweep=lr_search", "hydra.sweeper.n_trials=2")
    done, folder = sweep(*search)
    assert done.returncode == 0, done.stderr
    found = results(folder)
    assert len(found) == 2 and all(name.startswith("trainer.optim.lr=") for name in found)
    best = OmegaConf.load(folder / "optimization_results.yaml")
    assert best.best_value == max(result["optimized_metric"] for result in found.values())
    again, same = sweep(*search)
    assert again.returncode == 0 and same == folder, again.stderr
    assert again.stderr.count("completed already: skipped") == 2 and results(folder) == found
    assert OmegaConf.load(folder / "optimization_results.yaml") == best
