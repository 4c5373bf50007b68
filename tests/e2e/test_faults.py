"""Runs that end badly: they end soon, say why, and leave no process behind. Kills in every phase: tests/faults."""

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

pytestmark = pytest.mark.slow

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

    def member(self, *words: str) -> int:
        """The youngest descendant whose command line has all `words`."""
        return max(pid for pid, line in self.family.items() if all(word in line for word in words))

    def ended(self) -> tuple[int, str]:
        """Status and stderr, once nothing of the run is left."""
        _, stderr = self.process.communicate(timeout=patient(20))
        wait_until(lambda: not any(map(running, self.family)), 10, f"all of {self.family} are gone")
        wait_until(lambda: not self.left, 10, f"{self.left} are gone")
        return self.process.returncode, stderr

    def close(self) -> None:
        for pid in (self.process.pid, *self.family):
            if running(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def running_run(inline_command, tmp_path):
    """A run with its engine in its own process, and a trainer beside it."""
    argv, env = inline_command(*ENDLESS, "launcher=local")
    run = Running(argv, env, tmp_path / "run")
    yield run
    run.close()


def test_a_killed_trainer_ends_the_run_with_its_name(running_run):
    started = time.monotonic()
    os.kill(running_run.member("-m prl.trainer"), signal.SIGKILL)
    status, stderr = running_run.ended()
    assert time.monotonic() - started < patient(15)
    assert status == 1
    assert "process 'trainer' ended with status 137" in stderr and "trainer.log" in stderr
    result = json.loads((running_run.dir / "result.json").read_text())
    assert result["status"] == "failed" and "process 'trainer'" in result["error"]
    assert result["steps"] > 0 and "reward/all/mean" in result["metrics"]
    assert "process &#39;trainer&#39; ended" in (running_run.dir / "report.html").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything_in_order(running_run, number, code):
    os.kill(running_run.process.pid, number)
    status, stderr = running_run.ended()
    assert status == code and "stopped" in stderr and "Traceback" not in stderr
    assert json.loads((running_run.dir / "result.json").read_text())["status"] == "stopped"


def test_an_engine_that_is_not_there_is_named(tmp_path):
    """What is refused before any process starts is in tests/config/test_command.py."""
    argv = [sys.executable, "-m", "prl.train", f"run.dir={tmp_path / 'run'}", "engine.urls=[http://127.0.0.1:9]"]
    env = {**os.environ, "PRL_TOKEN": "x"}
    argv.append("engine.startup_timeout_s=1")
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "http://127.0.0.1:9 was not ready" in done.stderr and "Traceback" not in done.stderr
