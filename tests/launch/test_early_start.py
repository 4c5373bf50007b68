"""Processes that start before their run is prepared: the run uses them, and a refused one leaves nothing of them."""

import sys

import pytest
from prepared_run import planned

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.engines.vllm.engine import VLLMEngine
from prl.launch.local import LocalLauncher
from prl.launch.run import prepare

FEW = ["envs.math.args.num_tasks=8", "envs.math.eval_args=null"]


@pytest.fixture
def launcher(monkeypatch):
    """A launcher whose engines only wait."""
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(VLLMEngine, "command", lambda spec, port: waiting)
    with LocalLauncher() as launcher:
        yield launcher


async def test_a_prepared_run_has_its_processes_started_once(launcher, tmp_path):
    config = compose([f"run.dir={tmp_path}/run", *FEW, "engine.servers=2", "trainer.num_processes=2"])
    prepared, start = prepare(config, planned(config), launcher)
    names = ["engine", "engine 2", "trainer rank 0", "trainer rank 1"]
    assert [process.name for process in launcher.processes] == names
    pool = prepared.plan.policy.policy(launcher.start_engine, start.engines)
    await pool.close()
    launcher.start_trainer(prepared.plan.trainer)
    assert list(pool.urls) == start.engines and len(launcher.processes) == 4
    assert all(process.stdin.closed for process in launcher.ranks), "each has its config"
    assert (tmp_path / "run" / "logs" / "engine.log").exists() and (tmp_path / "run").stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("there", [True, False])
def test_a_refused_run_leaves_neither_engine_nor_directory(launcher, tmp_path, there):
    run_dir = tmp_path / "run"
    if there:  # what a command leaves that was killed while it prepared
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "logs" / "engine.log").touch()
    config = compose([f"run.dir={run_dir}", "env=jsonl", "envs.jsonl.args.path=none.jsonl"])
    with pytest.raises(ConfigError, match="not a file"):
        prepare(config, planned(config), launcher)
    assert [process.status is None for process in launcher.processes] == [False, False]
    assert not run_dir.exists()


@pytest.mark.parametrize(("overrides", "started"), [(["dry_run=true"], []), (["engine=transformers"], ["trainer"])])
def test_no_process_is_started_that_is_not_needed(launcher, tmp_path, overrides, started):
    config = compose([f"run.dir={tmp_path}/run", *FEW, *overrides])
    prepare(config, planned(config), launcher)
    assert [process.name for process in launcher.processes] == started
    assert (tmp_path / "run").exists() == bool(started)
