"""Several engines behind one orchestrator: a run with two of its own, one of which is killed in the middle."""

import glob
import json
import os
import signal
import subprocess
import sys

import pytest
from engines import finished
from run_processes import family, running, wait_until

from prl.tools.report.shares import read_spans, shares

pytestmark = pytest.mark.engine

WORK = ("generating", "loading weights")
GRADER = """
import time

def unhurried(reply, answer):
    time.sleep(0.05)
    return float(reply.strip() == answer)
"""
"""Leaves the cores to an engine that starts."""
ON_POLICY = (
    "model=tiny",
    *("env=jsonl", "envs.jsonl.args.path=sums.jsonl", "envs.jsonl.args.grader=unhurried.unhurried"),
    "filters=none",  # a group whose replies are all wrong trains too
    "engine.servers=2",
    "weights=transfer",  # by files: `test_own_engine.py`
    "trainer.num_processes=2",
    "max_steps=100000",
    "orchestrator.batch_size=16",
    "orchestrator.max_async_level=0",
    "orchestrator.eval.every=null",
    "monitor.console.mode=plain",
)


def test_run_goes_on_while_one_engine_restarts(tmp_path):
    folder, printed = tmp_path / "run", tmp_path / "stderr"
    (tmp_path / "unhurried.py").write_text(GRADER)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 30) for b in range(10, 30)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "prl.train", *ON_POLICY, f"run.dir={folder}"]
    with printed.open("w") as stderr:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=stderr)

    def steps() -> list[dict]:
        assert process.poll() is None, printed.read_text()
        metrics = folder / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

    try:
        wait_until(lambda: len(steps()) > 2, 240, "the run trains", pause_s=0.02)
        engines = {pid: line for pid, line in family(process.pid).items() if "-m prl.engines.vllm.server" in line}
        servers = sorted(pid for pid, line in engines.items() if "children.py" not in line)
        assert len(servers) == 2, engines
        offers = str(folder / "weights/*/*/offer")
        offered = set(glob.glob(offers))  # not Path.glob: it raises where a folder goes meanwhile
        wait_until(lambda: set(glob.glob(offers)) - offered, 60, "an update", 0.0005)
        killed_at = steps()[-1]["step"]
        os.kill(servers[0], signal.SIGKILL)
        wait_until(lambda: not running(servers[0]), 10, "the engine's end")
        wait_until(lambda: len(steps()) > killed_at + 3, 60, "steps with one engine", pause_s=0.02)
        assert "answers again" not in printed.read_text(), "it goes on before the other is back"
        wait_until(lambda: "answers again" in printed.read_text(), 240, lambda: f"the engine is back at {steps()[-1]}")
        back_at = steps()[-1]["step"]
        wait_until(lambda: len(steps()) > back_at + 6, 120, "steps with both engines")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM, printed.read_text()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    run = finished(folder, process.returncode, printed.read_text())
    assert [line["step"] for line in run.steps] == list(range(len(run.steps)))
    assert "killed by SIGKILL" in run.stderr and "It is started again" in run.stderr
    assert run.column("engine/restarts")[-1] == 1
    assert all(gap < 1e-5 for gap in run.column("logprob_gap/mean")), run.column("logprob_gap/mean")
    assert sum(run.column("rollouts/errored")) == 0, "what it had was sampled by the other"
    assert set(run.column("off_policy/max")) == {0}
    spans = read_spans(folder, problems := [])
    tracks = [name for name in shares(spans).did if name != "evaluation"]
    assert not problems and tracks == ["orchestrator", "engine 1", "engine 2", "trainer", "trainer rank 1"]
    after = [span for span in spans if span.step > back_at + 1]
    for engine in tracks[1:3]:
        done = {what: {span.step for span in after if (span.process, span.what) == (engine, what)} for what in WORK}
        assert len(done["generating"]) > 3 and len(done["loading weights"]) > 3, f"{engine} is at work again"
    assert {path.name for path in (folder / "logs").iterdir()} >= {"engine.log", "engine_2.log", "trainer.log"}
