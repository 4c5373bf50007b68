"""What vLLM samples is what the trainer computes, with the weights that an engine starts with and with later ones.

Small random models of each architecture, each in an engine with prl's arguments and patches.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from architectures import SERVED, longrope, write_model
from engines import policy_spec
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from prl.config.schema import ModelConfig
from prl.engines.vllm.engine import VLLMConfig, VLLMEngine
from prl.engines.vllm.server import LIVE
from prl.losses import default_loss
from prl.models import model_path
from prl.rollouts.messages import StepBatch, TrainingSample
from prl.rollouts.packing import pack
from prl.trainer.model import load_model
from prl.trainer.trainer import Trainer

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("served models")]  # of one process

SCRIPT = Path(__file__).parents[1] / "support" / "served_models.py"
COPIED = "gpt-oss"
"""Copies weights into place without a loader, which vLLM's reload loses."""
ROPES = {"short factors": 256, "long factors": 64}
"""Lengths up to which a Phi-3 of them has short factors, in an engine with a `max_model_len` of 256."""
HALF = {"sinks": "float16", "large logits": "bfloat16"}


def changed(folder: Path, into: Path, change) -> Path:
    """The model folder with what `change` makes of its tensors."""
    shutil.copytree(folder, into)
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), into / "model.safetensors", metadata={"format": "pt"})
    return into


def with_sinks_lowered(tensors):
    """An engine's attention has a copy of them in half precision."""
    return {name: tensor - 2 * name.endswith(".sinks") for name, tensor in tensors.items()}


@torch.no_grad()
def with_large_logits(folder: Path, noise: float) -> Path:
    """`tiny` with a head of its own, to whose rows one vector is added: it raises all logits alike, by some 100.

    No probability changes by that, and in bfloat16 logits there are off by up to 0.25.
    """
    tiny = AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float32)
    torch.manual_seed(0)
    for layer in tiny.model.layers:
        layer.mlp.up_proj.weight += noise * torch.randn_like(layer.mlp.up_proj.weight)
    prompt = torch.tensor([[257, *b"12+34=", 258, 257]])
    mean = tiny.model(prompt).last_hidden_state[0].mean(0)
    head = tiny.lm_head.weight + 100 * mean / mean.norm() ** 2
    config = AutoConfig.from_pretrained(model_path("tiny"), tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(tiny.state_dict() | {"lm_head.weight": head})
    shutil.copytree(model_path("tiny"), folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def weights_of(name: str, folder: Path) -> tuple[Path, Path]:
    """The model that an engine starts with, and later weights."""
    if name == "large logits":
        return with_large_logits(folder / "old", 0.0), with_large_logits(folder / "new", 0.05)
    if name == "sinks":
        old = write_model(folder / "old", "gpt-oss", tied=False)
        return old, changed(old, folder / "new", with_sinks_lowered)
    if name in ROPES:
        options = {"tied": False} | longrope(ROPES[name])
        return tuple(write_model(folder / f"{seed}", "Phi-3", seed=seed, **options) for seed in range(2))
    options = {"tied": SERVED[name] == "tied"}
    options |= {"attention_bias": True, "mlp_bias": True} if name == "Llama" else {}
    old, new = (write_model(folder / part, name, seed=seed, **options) for seed, part in enumerate(("old", "new")))
    return old, new


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("served")
    return {name: weights_of(name, base / name) for name in (*SERVED, *ROPES, *HALF)}


@pytest.fixture(scope="module")
def served(folders, tmp_path_factory):
    """By model, what `served_models.py` has observed."""
    jobs, out = (tmp_path_factory.mktemp("jobs") / name for name in ("jobs.json", "out.json"))
    given, spec = {}, replace(policy_spec("", out), config=VLLMConfig(max_num_seqs=16))
    for name, (old, new) in folders.items():
        model = ModelConfig(path=str(old), dtype=HALF.get(name, "float32"), max_model_len=256)
        command = VLLMEngine.command(replace(spec, model=model), 0)[3:]
        arguments = [*LIVE, *command]
        broken = changed(old, old.parent / "broken", lambda tensors: tensors | {"z.weight": torch.ones(1)})
        given[name] = {"arguments": arguments, "old": str(old), "new": str(new), "broken": str(broken)}
    jobs.write_text(json.dumps(given))
    environment = os.environ | VLLMEngine.environment(spec) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, str(SCRIPT), str(jobs), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def gap_of(folder: Path, replies: list[dict]) -> float:
    """The mean difference of the engine's logprobs from those that the trainer computes with a folder's weights."""
    samples = []
    for number, reply in enumerate(replies):
        on = [0.0] * len(reply["prompt"]) + [1.0] * len(reply["tokens"])
        samples.append(
            TrainingSample(
                token_ids=reply["prompt"] + reply["tokens"],
                mask=[bool(each) for each in on],
                logprobs=[0.0] * len(reply["prompt"]) + reply["logprobs"],
                temperatures=[1.0] * len(on),
                env_name="x",
                reward=0.0,
                advantages=[(-1.0) ** number * each for each in on],
            )
        )
    model = load_model(str(folder), device=torch.device("cpu"), max_model_len=256)
    trainer = Trainer(model=model, rl_losses={"": default_loss}, max_steps=1, device="cpu")
    metrics = trainer.train_step(StepBatch(1, pack(samples, 256, 1)[0][0], 0))
    assert metrics["tokens/rl"] == sum(len(reply["tokens"]) for reply in replies) == 8 * 20
    return metrics["logprob_gap/mean"]


@pytest.mark.parametrize("name", [*SERVED, *ROPES])
def test_engine_and_trainer_agree_before_and_after_an_update(folders, served, name):
    (old, new), found = folders[name], served[name]
    assert found["errors"] == [None, None]
    assert gap_of(old, found["old"]) < 1e-5 and gap_of(new, found["new"]) < 1e-5
    assert gap_of(old, found["new"]) > 0.1, "the weights do differ"
    assert found["back"] == found["old"], "bit by bit"


@pytest.mark.parametrize("name", SERVED)
def test_vllms_own_reload_loads_the_same_or_says_what_it_loses(served, name):
    found = served[name]
    if name == COPIED:
        assert "does not take" in found["reload error"] and "sinks" in found["reload error"]
    else:
        assert (found["reload error"], found["reloaded"]) == (None, found["new"])


@pytest.mark.parametrize("name", SERVED)
def test_an_engine_that_failed_half_way_stays_so(served, name):
    assert "z" in served[name]["broken"] and "start the engine again" in served[name]["after broken"]


@pytest.mark.parametrize(("name", "near", "far"), [("sinks", 0.02, 0.2), ("large logits", 0.03, 0.2)])
def test_in_half_precision_they_agree_too(folders, served, name, near, far):
    """Of sinks, of which alone an update changes; of logits, which are in float32: in bfloat16 the gap is 0.055."""
    (old, new), found = folders[name], served[name]
    assert gap_of(old, found["old"]) < near and gap_of(new, found["new"]) < near
    assert gap_of(old, found["new"]) > far
