"""A run in bfloat16 on a CPU: the engine's weights and the trainer's model."""

import json
import os
import shutil
import statistics
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from prl.models import model_path
from prl.transport.checkpoint_folders import checkpoint_path
from prl.transport.files import FileTransport

BFLOAT16 = ("model.dtype=bfloat16", "trainer.dtype=bfloat16")
HALF = ("experiment=on_policy", "env=math", "orchestrator.eval.every=null", *BFLOAT16)


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


@torch.no_grad()
def with_large_logits(folder):
    """`tiny` with a head of its own, to whose rows one vector is added: it raises all logits alike, by some 100.

    No probability changes by that, and in bfloat16 logits there are off by up to 0.25.
    """
    tiny = AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float32)
    prompt = torch.tensor([[257, *b"12+34=", 258, 257]])
    mean = tiny.model(prompt).last_hidden_state[0].mean(0)
    head = tiny.lm_head.weight + 100 * mean / mean.norm() ** 2
    config = AutoConfig.from_pretrained(model_path("tiny"), tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(tiny.state_dict() | {"lm_head.weight": head})
    shutil.copytree(model_path("tiny"), folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.engine
def test_logits_of_an_engine_in_bfloat16_are_in_float32_also_after_updates(tmp_path):
    """vLLM's own would be in bfloat16: of this model the gap is 0.03 then."""
    model = with_large_logits(tmp_path / "model")
    argv = [sys.executable, "-m", "prl.train", *HALF, f"model.path={model}", "max_steps=4", f"run.dir={tmp_path}/run"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert 1e-3 < statistics.mean(line["logprob_gap/mean"] for line in lines) < 0.015
