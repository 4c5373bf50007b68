"""A run in bfloat16 on a CPU: the engine's weights and the trainer's model."""

import json
import os
import statistics
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from prl.wire.checkpoints import checkpoint_path
from prl.wire.files import FileTransport

pytestmark = pytest.mark.engine


def test_engine_and_trainer_in_bfloat16_train_and_keep_float32(tmp_path):
    overrides = ("experiment=on_policy", "env=math", "model.dtype=bfloat16", "trainer.dtype=bfloat16", "max_steps=8")
    argv = [sys.executable, "-m", "prl.train", *overrides, "orchestrator.eval.every=null", f"run.dir={tmp_path}/run"]
    done = subprocess.run(
        argv, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert len(lines) == 8
    assert all(1e-3 < line["logprob_gap/mean"] < 0.03 for line in lines), "both round, and neither is of older weights"
    rewards = [line["reward/all/mean"] for line in lines]
    assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:2]) + 0.1
    published = load_file(FileTransport(folder).weights_path(8) / "model.safetensors")
    kept = load_file(checkpoint_path(folder, 8) / "model.safetensors")
    assert {each.dtype for each in published.values()} == {torch.bfloat16}
    assert {each.dtype for each in kept.values()} == {torch.float32}
    assert all(torch.equal(published[name], weight.bfloat16()) for name, weight in kept.items())
    assert any(not torch.equal(published[name].float(), weight) for name, weight in kept.items())
