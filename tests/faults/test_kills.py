"""A run that is killed at any moment leaves no process and nothing half written, and goes on with each step once."""

import json
import os
import signal
from pathlib import Path

import msgspec
import pytest
from engines import started
from run_processes import family, running, wait_until
from safetensors import safe_open

from prl.base.checkpoint_folders import checkpoint_path, steps_of, verify
from prl.runs.result import read_result
from prl.tools.report.runs import read_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kills")]  # of one run

OVERRIDES = (
    *("engine=transformers", "launcher=local", "monitor.console.mode=plain", "run.resume=auto"),
    *("checkpoint.every=1", "orchestrator.batch_size=32", "orchestrator.eval.every=null"),
)
MOMENTS = {
    "launcher, checkpointing": (signal.SIGKILL, "prl.train ", "checkpoints/.step_*"),
    "launcher, updating": (signal.SIGKILL, "prl.train ", "weights/step_*"),
    "trainer, checkpointing": (signal.SIGTERM, "prl.trainer ", "checkpoints/.step_*"),
}
"""The signal, words of the command line of the process that gets it, and what appears in the run directory then."""


class Run:
    """One command in one directory, begun again after each kill."""

    def __init__(self, folder: Path, forks):
        self.dir = folder / "run"
        self.stderr = folder / "stderr"
        self.forks = forks

    def begin(self, *overrides: str) -> None:
        given = {
            "arguments": [f"run.dir={self.dir}", *OVERRIDES, *overrides],
            "env": {**os.environ, "OMP_NUM_THREADS": "1"},
            "folder": str(self.dir.parent),
            "stderr": str(self.stderr),
        }
        self.process = started(self.forks, given)

    def lines(self) -> list[dict]:
        path = self.dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def trains(self) -> None:
        """Wait for a step more, and a checkpoint."""
        before = len(self.lines())

        def further() -> bool:
            assert self.process.is_alive(), self.stderr.read_text()
            return len(self.lines()) > before and bool(steps_of(self.dir))

        wait_until(further, 240, "the run trains")

    def kill(self, number: signal.Signals, words: str, pattern: str) -> None:
        """Send a signal as soon as a new path of the pattern is in the directory, and wait for all to be gone."""
        processes = family(self.process.pid) | {self.process.pid: "-m prl.train "}
        pid = max(pid for pid, line in processes.items() if words in line)  # the trainer, not its supervisor
        seen = set(self.dir.glob(pattern))
        wait_until(lambda: set(self.dir.glob(pattern)) - seen, 30, pattern, 0.0005)
        os.kill(pid, number)
        self.process.join(30)
        wait_until(lambda: not any(map(running, processes)), 10, "all processes are gone")


def check_whole(run_dir: Path) -> None:
    """Check that every file that has its final name can be read."""
    for step in steps_of(run_dir):
        assert verify(checkpoint_path(run_dir, step)) == step
    for path in run_dir.glob("weights/step_*/*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.keys()
    for path in run_dir.glob("batches/step_*/[!.]*.msgpack"):
        msgspec.msgpack.decode(path.read_bytes())
    assert read_run(run_dir).problems == []


@pytest.fixture(scope="module")
def run(tmp_path_factory, forks):
    run = Run(tmp_path_factory.mktemp("killed"), forks)
    run.begin("max_steps=100000")
    yield run
    run.process.terminate()
    run.process.join(120)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_leaves_nothing_and_goes_on(run, moment):
    run.trains()
    number, words, pattern = MOMENTS[moment]
    run.kill(number, words, pattern)
    printed = run.stderr.read_text()
    if not moment.startswith("launcher"):
        assert run.process.exitcode == 1 and "process 'trainer' ended with status" in printed, printed
        assert "Traceback" not in printed
        result = read_result(run.dir)
        assert result.status == "failed" and "process 'trainer'" in result.error and result.steps > 0
        assert "process &#39;trainer&#39; ended" in (run.dir / "report.html").read_text()
    check_whole(run.dir)
    run.begin("max_steps=100000")
    run.trains()
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(len(lines)))
    played = set()
    for path in sorted((run.dir / "rollouts").glob("step_*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            key = record["group"], record["rollout"]
            assert key not in played, "no rollout is recorded twice"
            played.add(key)
