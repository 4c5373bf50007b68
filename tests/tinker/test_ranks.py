"""A learner on one rank and on two: both do what plain torch does, and one goes on where the other was."""

import math
import os
import subprocess
import sys
from pathlib import Path

import forking
import msgspec
import peft
import psutil
import pytest
import tinker_ranks
import torch
from safetensors.torch import load_file
from tinker_ranks import CLIPPED, LENGTHS, PLAIN, data_of
from tinker_server import KEY, Client, Model, running, text
from transformers import AutoModelForCausalLM

from prl.models import model_path
from prl.tinker.ranks import join


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What one rank and two have written, by their number."""
    made = {ranks: tmp_path_factory.mktemp(f"ranks_{ranks}") for ranks in (1, 2)}
    tinker_ranks.play(join(tinker_ranks.config_of(1), 0)[0], made[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        assert forking.exit_codes(tinker_ranks.main, [(made[2], rank, 2) for rank in range(2)], 200) == [0, 0]
    return made


@pytest.fixture(params=(1, 2))
def folder(folders, request):
    return folders[request.param]


def results(folder: Path):
    return msgspec.msgpack.decode((folder / "results").read_bytes())


def base():
    return AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float64)


def losses(model, data, loss):
    """The logprobs of the targets of each datum by plain torch, and the loss."""
    logprobs, total = [], torch.zeros((), dtype=torch.float64)
    for datum in data:
        inputs = {name: torch.tensor(values) for name, values in datum.inputs.items()}
        logits = model(input_ids=torch.tensor([datum.tokens])).logits[0].log_softmax(-1)
        targets = inputs["target_tokens"]
        t = logits.gather(1, targets.view(len(targets), -1)).view(targets.shape)
        if loss == "cross_entropy":
            total = total - (t * inputs["weights"]).sum()
        else:
            ratio, advantages = (t - inputs["logprobs"]).exp(), inputs["advantages"].double()
            total = total - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        logprobs.append(t.detach())
    return logprobs, total


def assert_same_pass(found, data, expected):
    logprobs, total = expected
    assert found["metrics"]["loss:sum"] == pytest.approx(total.item(), rel=1e-5)
    assert found["shapes"] == [list(values.shape) for values in logprobs]
    for content, values in zip(found["logprobs"], logprobs, strict=True):
        own = torch.frombuffer(bytearray(content), dtype=torch.float32).view(values.shape)
        # Of the base some targets have a logprob of -28, which float32 has to 2e-6.
        torch.testing.assert_close(own.double(), values, atol=1e-5, rtol=1e-6)


def norm_of(parameters):
    return math.sqrt(sum(p.grad.square().sum().item() for p in parameters if p.grad is not None))


def stepped(model, adam):
    """Take the step of plain torch. Returns the norm of the gradient before it was clipped."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    norm = norm_of(parameters)
    if adam.grad_clip_norm:
        torch.nn.utils.clip_grad_norm_(parameters, adam.grad_clip_norm)
    betas = (adam.beta1, adam.beta2)
    torch.optim.AdamW(
        parameters, lr=adam.learning_rate, betas=betas, eps=adam.eps, weight_decay=adam.weight_decay
    ).step()
    return norm


def test_an_adapter_is_trained_as_by_plain_torch(folder):
    found = results(folder)
    model = peft.PeftModel.from_pretrained(base(), str(folder / "start"), is_trainable=True).double()
    several = data_of("cross_entropy", targets=3)
    assert_same_pass(found["pass 0"], several, losses(model, several, "cross_entropy"))
    for key, data in (("pass 1", data_of("ppo")), ("pass 2", data_of("ppo", LENGTHS[:1], seed=2))):
        expected = losses(model, data, "ppo")
        assert_same_pass(found[key], data, expected)
        expected[1].backward()
    assert "this gradient is" in found["pass 3"] and "loss_fn=none" in found["pass 4"], "and nothing was added"
    norm = stepped(model, CLIPPED)
    assert found["step"]["metrics"] == {"unclipped_grad_l2:mean": pytest.approx(norm, rel=1e-5), "step:max": 1.0}
    after, merged = load_file(folder / "after.safetensors"), load_file(folder / "merged.safetensors")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            own = after[f"weight/{name.replace('.default', '')}"]
            torch.testing.assert_close(own.double(), parameter.detach(), atol=1e-5, rtol=0)
    start = peft.PeftModel.from_pretrained(base(), str(folder / "start")).merge_and_unload().state_dict()
    assert {name: value.shape for name, value in merged.items()} == {name: start[name].shape for name in merged}
    assert all(torch.allclose(value.double(), start[name], atol=1e-6) for name, value in merged.items())


def test_all_weights_are_trained_as_by_plain_torch(folder):
    found, model = results(folder), base()
    data, one = data_of("cross_entropy", seed=5), data_of("cross_entropy", LENGTHS[:1], seed=4)
    for key, some in (("pass 6", data), ("pass 7", one)):
        expected = losses(model, some, "cross_entropy")
        assert_same_pass(found[key], some, expected)
        expected[1].backward()
    norm = stepped(model, PLAIN)
    assert found["whole step"]["metrics"]["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=1e-5)
    assert_same_pass(found["pass 9"], data, losses(model, data, "cross_entropy"))
    whole = load_file(folder / "whole.safetensors")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole[f"weight/{name}"].double(), parameter.detach(), atol=1e-5, rtol=0)


def test_what_two_ranks_have_written_one_rank_goes_on_from(folders):
    saved = load_file(folders[2] / "gradient.safetensors")
    learner, _ = join(tinker_ranks.config_of(1), 0)
    learner.add("again", tinker_ranks.Lora(rank=3))
    learner.put("again", saved, 1)
    assert all(torch.equal(saved[key], value) for key, value in learner.tensors("again").items())
    learner.optim_step("again", CLIPPED)
    after = load_file(folders[2] / "after.safetensors")
    for key, value in learner.tensors("again").items():
        torch.testing.assert_close(value, after[key], atol=1e-6, rtol=0)


OPTIONS = "num_processes=2 shard_size=1 dtype=float32 threads=1 share_prefixes=false gradient_checkpointing=full"


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_server_and_the_next_start_goes_on(tmp_path):
    given = [f"trainer.{option}" for option in OPTIONS.split()]
    command = [sys.executable, "-m", "prl.serve", "api=tinker", "port=0", "dir=state", "model.max_model_len=64", *given]
    environment = {**os.environ, "TINKER_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as serving:
        lines = iter(serving.stderr.readline, "")
        client = Client(next(line.split("=")[1].split()[0] for line in lines if "TINKER_BASE_URL=" in line))
        model = client.model()
        model.train([text(20), text(30, seed=1)])
        model.step(learning_rate=0.01)
        norm = model.train([text(25, seed=2)])
        logprobs = model.logprobs([text(12)])
        children = psutil.Process(serving.pid).children(recursive=True)
        [rank] = [each for each in children if each.cmdline()[1:3] == ["-m", "prl.tinker.ranks"]]
        rank.kill()
        assert serving.wait(60) == 1 and "process 'trainer rank 1' ended" in serving.stderr.read()
    with running(tmp_path / "state") as client:
        again = Model(client, model.id, model.session, model.number)
        assert again.logprobs([text(12)])[0] == pytest.approx(logprobs[0], abs=1e-5)
        assert again.step()["metrics"]["step:max"] == 2 and norm["metrics"]["loss:sum"] > 0
