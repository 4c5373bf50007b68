"""A run that trains adapters: what the engine samples from, what it leaves, and going on from it."""

import statistics
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prl.base.checkpoint_folders import checkpoint_path
from prl.models import model_path

pytestmark = [pytest.mark.slow, pytest.mark.engine]

KNOBS = (
    "experiment=on_policy",
    "algo=grpo",
    "env=math",
    "model.lora.rank=8",
    "trainer.optim.lr=4e-3",
    "orchestrator.eval.every=null",
)


def test_adapters_learn_and_are_kept_for_peft(inline):
    import peft  # takes .4 s, of each process that collects tests

    run = inline(*KNOBS, "max_steps=10")
    assert run.status == 0, run.stderr
    assert all(gap < 1e-5 for gap in run.column("logprob_gap/mean"))
    assert set(run.column("off_policy/max")) == {0.0}
    rewards = run.column("reward/all/mean")
    assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:2]) + 0.1

    folder = checkpoint_path(run.dir, 10)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    base = AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float32)
    start = {name: weight.clone() for name, weight in base.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], weight) for name, weight in whole.items())
    assert {name for name in whole if not torch.equal(whole[name], start[name])} == {
        name for name in whole if name.endswith("_proj.weight")
    }

    more = inline(
        *KNOBS, "max_steps=12", "run.resume=auto", "trainer.num_processes=2", "launcher=local", "engine=default"
    )
    assert more.status == 0, more.stderr
    (version,) = (run.dir / "weights").iterdir()
    assert {file.name for file in version.glob("*.safetensors")} == {"adapter_model.safetensors"}, "sent alone"
    assert [line["step"] for line in more.steps] == list(range(13))
    assert all(gap < 1e-5 for gap in more.column("logprob_gap/mean"))
    assert statistics.mean(more.column("reward/all/mean")[-2:]) > statistics.mean(rewards[:2]) + 0.1
    assert (Path(checkpoint_path(run.dir, 12)) / "adapter" / "adapter_config.json").is_file()
