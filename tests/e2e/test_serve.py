"""`python -m prl.serve policy=true`: an engine that runs train with, one after another."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.engine

WAIT_S = 240


@pytest.fixture(name="served")
def _served(tmp_path):
    """A server that was started without a token, and what it has said."""
    printed = tmp_path / "said"
    command = [sys.executable, "-m", "prl.serve", "policy=true", "model=tiny", "engine.port=null", f"log={printed}.log"]
    env = {name: value for name, value in os.environ.items() if name != "PRL_TOKEN"} | {"OMP_NUM_THREADS": "1"}
    with printed.open("wb") as output, subprocess.Popen(command, stderr=output, env=env) as process:
        try:
            deadline = time.monotonic() + WAIT_S
            while "Ctrl-C ends it." not in printed.read_text():
                assert process.poll() is None and time.monotonic() < deadline, printed.read_text()
                time.sleep(0.1)
            yield process, printed.read_text()
        finally:
            process.terminate()
            process.wait(60)


def test_runs_train_with_it_one_after_another(served, tmp_path):
    """With the command that it prints; each begins with the model's own weights, whatever the last one has trained."""
    process, printed = served
    [token] = re.findall(r"^  export PRL_TOKEN=(\S+)$", printed, re.M)
    [command] = re.findall(r"^  python (-m prl\.train model=tiny engine\.urls=\[http://\S+\])$", printed, re.M)
    options = ["max_steps=2", "trainer.optim.lr=1e-2", "orchestrator.eval.num_tasks=16", "orchestrator.batch_size=32"]
    found = []
    for name in ("first", "second"):
        run = [sys.executable, *command.split(), *options, f"run.dir={tmp_path / name}"]
        done = subprocess.run(
            run, env=os.environ | {"PRL_TOKEN": token}, capture_output=True, text=True, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stderr
        assert "starting the trainer" in done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append({step["step"]: step["eval/math/avg@1"] for step in map(json.loads, lines) if step["step"] != 1})
    assert found[0][0] == found[1][0] != found[0][2]
    assert process.poll() is None
