"""Runs that end badly: they end soon, say why, and leave no process behind. Kills in every phase: tests/faults."""

import json
import os
import signal
import subprocess
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


def test_ctrl_c_stops_everything_in_order(running_run):
    os.kill(running_run.process.pid, signal.SIGINT)
    status, stderr = running_run.ended()
    assert status == 130 and "stopped" in stderr and "Traceback" not in stderr
    assert json.loads((running_run.dir / "result.json").read_text())["status"] == "stopped"


def test_an_engine_that_is_not_there_is_named(inline, monkeypatch):
    monkeypatch.setenv("PRL_TOKEN", "x")
    run = inline("engine=default", "engine.urls=[http://127.0.0.1:9]", "engine.startup_timeout_s=1")
    assert run.status == 1 and "http://127.0.0.1:9 was not ready" in run.stderr
