"""Runs that end badly: they end soon, say why, and leave no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import patient
from run_processes import family, left_in, running, scratch_of, wait_until

from prl.report.runs import read_run

pytestmark = pytest.mark.engine

ENDLESS = ("max_steps=100000", "orchestrator.batch_size=64", "orchestrator.eval.every=null")


class Running:
    """A run in the background, past its first steps."""

    def __init__(self, argv: list[str], env: dict[str, str], run_dir: Path):
        self.dir = run_dir
        self.process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
        metrics = run_dir / "metrics.jsonl"

        def trains() -> bool:
            assert self.process.poll() is None, self.process.stderr.read()
            return metrics.exists() and metrics.read_text().count("\n") > 2

        wait_until(trains, 120, "the run trains")
        self.family = family(self.process.pid)
        self.scratch = scratch_of(self.member("children.py"))

    @property
    def left(self) -> list[str]:
        return left_in(self.scratch)

    @property
    def steps(self) -> list[dict]:
        return [json.loads(line) for line in (self.dir / "metrics.jsonl").read_text().splitlines()]

    def member(self, *words: str) -> int:
        """The youngest descendant whose command line has all `words`."""
        return max(pid for pid, line in self.family.items() if all(word in line for word in words))

    def ended(self, timeout: float = 20) -> tuple[int, str]:
        """Status and stderr, once nothing of the run is left."""
        _, stderr = self.process.communicate(timeout=patient(timeout))
        wait_until(lambda: not any(map(running, self.family)), 10, f"all of {self.family} are gone")
        wait_until(lambda: not self.left, 10, f"{self.left} are gone")
        return self.process.returncode, stderr

    def close(self) -> None:
        for pid in (self.process.pid, *self.family):
            if running(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def shared(command, tmp_path):
    """A run on the shared engine."""
    argv, env = command(*ENDLESS)
    run = Running(argv, env, tmp_path / "run")
    yield run
    run.close()


@pytest.fixture
def own(tmp_path):
    """`own(*overrides)`: a run with an engine of its own."""
    runs = []

    def start(*overrides: str) -> Running:
        argv = [sys.executable, "-m", "prl.train", *ENDLESS, f"run.dir={tmp_path / 'run'}", *overrides]
        runs.append(Running(argv, {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "run"))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_a_killed_trainer_ends_the_run_with_its_name(shared):
    started = time.monotonic()
    os.kill(shared.member("-m prl.trainer"), signal.SIGKILL)
    status, stderr = shared.ended()
    assert time.monotonic() - started < patient(15)
    assert status == 1
    assert "process 'trainer' ended with status 137" in stderr and "trainer.log" in stderr
    result = json.loads((shared.dir / "result.json").read_text())
    assert result["status"] == "failed" and "process 'trainer'" in result["error"]
    assert result["steps"] > 0 and "reward/all/mean" in result["metrics"]
    assert "process &#39;trainer&#39; ended" in (shared.dir / "report.html").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything_in_order(shared, number, code):
    os.kill(shared.process.pid, number)
    status, stderr = shared.ended()
    assert status == code and "stopped" in stderr and "Traceback" not in stderr
    assert json.loads((shared.dir / "result.json").read_text())["status"] == "stopped"


def test_a_killed_engine_is_started_again_and_the_run_goes_on_to_its_last_step(own):
    run = own("max_steps=30", "monitor.console.mode=plain")
    core = run.member("EngineCore") if any("EngineCore" in line for line in run.family.values()) else 0
    core = core or run.member("spawn_main")
    before = run.steps[-1]["step"]
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: run.steps[-1].get("engine/restarts") == 1, 120, "a step with the second engine")
    run.family |= family(run.process.pid)
    status, stderr = run.ended(timeout=120)
    assert status == 0, stderr
    steps = run.steps
    assert [line["step"] for line in steps] == list(range(31)) and before < 30
    assert steps[-1]["engine/restarts"] == 1 and steps[-1]["engine/requests_reissued"] > 0
    assert not any(line.get("errors/math/engine", 0) for line in steps), "no rollout was lost"
    assert "process 'inference' ended with status" in stderr and "inference answers again" in stderr


def test_kill_9_of_the_launcher_leaves_nothing_behind(own):
    run = own()
    assert len(run.family) >= 5, "two supervisors, the trainer, the server and its core"
    assert read_run(run.dir).status == "running" and list(run.scratch.iterdir())
    run.process.kill()
    run.ended()
    assert read_run(run.dir).status == "crashed"


def test_an_engine_that_is_not_there_is_named(tmp_path):
    """What is refused before any process starts is in tests/config/test_command.py."""
    argv = [sys.executable, "-m", "prl.train", f"run.dir={tmp_path / 'run'}", "inference.urls=[http://127.0.0.1:9]"]
    env = {**os.environ, "PRL_TOKEN": "x"}
    argv.append("inference.startup_timeout_s=1")
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "http://127.0.0.1:9 was not ready" in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_token_is_said(engine, tmp_path):
    argv = [sys.executable, "-m", "prl.train", f"run.dir={tmp_path / 'run'}", f"inference.urls=[{engine.url}]"]
    done = subprocess.run(argv, env={**os.environ, "PRL_TOKEN": "wrong"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "refused the token" in done.stderr and "Traceback" not in done.stderr
