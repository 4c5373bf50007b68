"""EXTENDING's example of an engine: a launcher starts it, it trains, is started again after a kill, and is planned."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engines import finished
from run_processes import family, running, wait_until

ROOT = Path(__file__).parents[2]
OWN = ("engine=mine", "hydra.searchpath=[file://my_conf]", "model=tiny")
ON_POLICY = (
    "filters=none",
    "orchestrator.batch_size=16",
    "orchestrator.max_async_level=0",
    "max_steps=100000",
    "+engine.servers=2",
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The example's files, where the command would be typed."""
    shutil.copy(ROOT / "experiments" / "my_engine.py", tmp_path)
    page = (ROOT / "prl" / "EXTENDING.md").read_text()
    name, text = re.search(r"^```yaml\n# (my_conf/engine/\S+)\n(.*?)^```", page, re.M | re.S).groups()
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_one_of_two_is_started_again_while_the_run_goes_on(files, tmp_path):
    folder, printed, metrics = tmp_path / "run", tmp_path / "stderr", tmp_path / "run" / "metrics.jsonl"
    plain = ("orchestrator.eval.every=null", "monitor.console.mode=plain", f"run.dir={folder}")
    command = [sys.executable, "-m", "prl.train", *OWN, *ON_POLICY, *plain]
    with printed.open("w") as stderr:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=env, stderr=stderr)

    def steps():
        assert process.poll() is None, printed.read_text()
        return metrics.read_text().count("\n") if metrics.exists() else 0

    try:
        wait_until(lambda: steps() > 3, 240, "the run trains")
        servers = [
            pid for pid, line in family(process.pid).items() if "my_engine.py" in line and "children.py" not in line
        ]
        assert len(servers) == 2
        os.kill(servers[0], signal.SIGKILL)
        wait_until(lambda: not running(servers[0]), 10, "the engine's end")
        wait_until(lambda: "answers again" in printed.read_text(), 120, "the engine is back")
        before = steps()
        wait_until(lambda: steps() > before + 3, 120, "steps with the engine that was started again")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM, printed.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    run = finished(folder, process.returncode, printed.read_text())
    assert run.column("engine/restarts")[-1] == 1
    assert all(gap < 1e-5 for gap in run.column("logprob_gap/mean")), run.column("logprob_gap/mean")


@pytest.mark.slow
def test_it_is_planned(files, inline, capsys):
    inline(*OWN, "launcher=local", "dry_run=true")
    assert "1 x engine" in capsys.readouterr().out
