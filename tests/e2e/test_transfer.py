"""A run whose weights, with their adapters merged, go from process to process: exact versions, and no files."""

import os
import subprocess
import sys

import pytest
from engines import finished

from prl.base.checkpoint_folders import steps_of

pytestmark = [pytest.mark.slow, pytest.mark.engine]

KNOBS = (
    *("weights=transfer", "orchestrator.strict_async_level=true", "orchestrator.max_async_level=2", "max_steps=7"),
    *("orchestrator.batch_size=32", "orchestrator.eval.every=3", "orchestrator.eval.num_tasks=8", "checkpoint.every=2"),
    *("checkpoint.keep_last=null", "trainer.num_processes=2", "model.lora.rank=8", "monitor.console.mode=plain"),
)


def test_each_version_is_loaded_and_rollouts_start_from_exactly_the_wanted_one(tmp_path):
    command = [sys.executable, "-m", "prl.train", *KNOBS, f"run.dir={tmp_path / 'run'}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    run = finished(tmp_path / "run", done.returncode, done.stderr)
    assert run.status == 0, run.stderr
    assert run.column("off_policy/mean") == run.column("off_policy/max") == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert len(run.column("time/update_weights")) == 7, "no version is left out"
    assert [line["step"] for line in run.steps if "eval/math/avg@1" in line] == [0, 3, 6, 7]
    assert run.steps[1]["logprob_gap/mean"] < 1e-5
    assert steps_of(run.dir) == [2, 4, 6, 7]
    assert not list(run.dir.glob("weights/**/*.safetensors"))
