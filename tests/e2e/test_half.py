"""A run in bfloat16 on a CPU: the weights that it publishes and those that it keeps."""

import statistics

import pytest
import torch
from safetensors.torch import load_file

from prl.base.checkpoint_folders import checkpoint_path
from prl.transport.files import FileTransport

BFLOAT16 = ("model.dtype=bfloat16", "trainer.dtype=bfloat16")
HALF = ("experiment=on_policy", "env=math", "orchestrator.eval.every=null", "orchestrator.batch_size=128", *BFLOAT16)


@pytest.mark.slow
def test_engine_and_trainer_in_bfloat16_train_and_keep_float32(inline):
    run = inline(*HALF, "max_steps=8")
    assert run.status == 0, run.stderr
    gaps, rewards = run.column("logprob_gap/mean"), run.column("reward/all/mean")
    assert len(gaps) == 8 and all(gap < 0.03 for gap in gaps), "both round, and neither is of older weights"
    assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:2]) + 0.1
    published = load_file(FileTransport(run.dir).weights_path(8) / "model.safetensors")
    kept = load_file(checkpoint_path(run.dir, 8) / "model.safetensors")
    assert {each.dtype for each in published.values()} == {torch.bfloat16}
    assert {each.dtype for each in kept.values()} == {torch.float32}
    assert all(torch.equal(published[name], weight.bfloat16()) for name, weight in kept.items())
    assert any(not torch.equal(published[name].float(), weight) for name, weight in kept.items())
