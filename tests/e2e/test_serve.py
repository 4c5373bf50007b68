"""`python -m prl.serve policy=true`: an engine that runs train with, one after another."""

import contextlib
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_runs_train_with_it_one_after_another(engine, train):
    """Each begins with the model's own weights, whatever the last one has trained. None writes the token anywhere."""
    options = ["trainer.optim.lr=1e-2", "orchestrator.eval.num_tasks=16", "orchestrator.batch_size=32"]
    runs = train(*options, "max_steps=1", name="first"), train(*options, "max_steps=1", name="second")
    assert [run.status for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stderr.startswith("starting trainer; reading the tasks\n")
    first, second = ({line["step"]: line.get("eval/math/avg@1") for line in run.steps} for run in runs)
    assert first[0] == second[0] != first[1]
    check_that_none_has(engine.token.encode(), runs[0])


def check_that_none_has(token, run):
    assert token not in run.stderr.encode()
    files = [path for path in run.dir.rglob("*") if path.is_file()]
    assert {"config.yaml", "provenance.json", "orchestrator.log", "trainer.log"} <= {path.name for path in files}
    assert [path for path in files if token in path.read_bytes()] == []
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if folder.stat().st_uid == os.getuid():
                lines.append((folder / "cmdline").read_bytes())
    assert any(b"prl.engines.vllm.server" in line for line in lines)
    assert [line for line in lines if token in line] == []
