"""Adapters: what they change against peft itself, what is trained, published and kept, and going on from it."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prl.base.errors import ConfigError
from prl.engines.vllm.weights import policy_tensors
from prl.losses import default_loss
from prl.rollouts.messages import StepBatch
from prl.rollouts.packing import pack
from prl.trainer.batch import stacks
from prl.trainer.lora import (
    ADAPTER,
    adapters_alone,
    add_adapters,
    check_targets,
    load_adapters,
    save_adapters,
    weights_of,
)
from prl.trainer.model import save_weights, stack_logprobs
from prl.trainer.trainer import Trainer

LORA = {"rank": 4, "alpha": 12.0, "target_modules": None}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model, seed=0, **changes):
    """The model with adapters that change it."""
    torch.manual_seed(seed)
    add_adapters(model, LORA | changes, "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    return model


@pytest.fixture
def stack(make_sample):
    rows, _ = pack([make_sample(20, 4, seed=seed) for seed in range(4)], 64, 1)
    return next(stacks(rows[0], 512, torch.device("cpu")))


def test_all_linear_layers_but_the_head_have_adapters(tiny, stack):
    """And change nothing before they are trained."""
    with torch.no_grad():
        before = stack_logprobs(tiny, stack, head_chunk=None)[0]
    shapes = {name: list(layer.weight.shape) for name, layer in tiny.named_modules() if name.endswith("_proj")}
    head = tiny.lm_head
    add_adapters(tiny, LORA, "base")
    trained = {name: list(p.shape) for name, p in tiny.named_parameters() if p.requires_grad}
    assert trained == {
        f"{name}.lora_{side}.default.weight": [4, shape[1]] if side == "A" else [shape[0], 4]
        for name, shape in shapes.items()
        for side in "AB"
    }
    assert len(shapes) == 4 * len(LINEAR) and tiny.lm_head is head
    with torch.no_grad():
        assert torch.equal(stack_logprobs(tiny, stack, head_chunk=None)[0], before)


@pytest.mark.parametrize("targets", [None, ["q_proj", "mlp.down_proj"]])
def test_what_is_published_is_what_peft_merges(tiny, tiny_path, tmp_path, targets):
    """And peft loads the adapters beside the base model, by its own way."""
    import peft

    model = adapted(tiny, target_modules=targets)
    save_weights(model, tmp_path / "merged", torch.float32)
    save_weights(model, tmp_path / "rounded", torch.bfloat16)
    save_adapters(model, tmp_path / ADAPTER)
    base = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / ADAPTER)
    assert set(loaded.peft_config["default"].target_modules) == set(targets or LINEAR)
    expected = loaded.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys() == before.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name
        ends = targets or LINEAR
        assert torch.equal(weight, before[name]) != any(f".{end}.weight" in name for end in ends), name
    engine = dict(policy_tensors(str(tmp_path / ADAPTER), Path(tiny_path)))
    assert adapters_alone(model)
    assert all(torch.equal(weight.float(), found[name]) for name, weight in engine.items()), "as an engine adds them"
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    assert all(torch.equal(weight, expected[name].bfloat16()) for name, weight in rounded.items()), "merged, then cast"
    name = "model.layers.1.mlp.down_proj"
    left, right = (
        load_file(tmp_path / ADAPTER / "adapter_model.safetensors")[f"base_model.model.{name}.lora_{side}.weight"]
        for side in "BA"
    )
    by_hand = before[f"{name}.weight"].double() + 12 / 4 * left.double() @ right.double()
    assert (found[f"{name}.weight"].double() - by_hand).abs().max() < 1e-7


def gradients(model, rows, **options):
    """Of all that is trained, after a step that changes nothing; and its metrics."""
    optim = {"_target_": "torch.optim.SGD", "lr": 1e-30}
    options = {"max_grad_norm": 1e9, "optim": optim} | options
    trainer = Trainer(model=model, rl_losses={"": default_loss}, max_steps=2, **options)
    metrics = trainer.train_step(StepBatch(1, rows, 0))
    return {name: parameter.grad for name, parameter in model.named_parameters()}, metrics


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_adapter_gradients_follow_from_those_of_merged_weights(tiny, make_sample, checkpointing):
    """W = W0 + 3 B A, so dB = 3 dW A' and dA = 3 B' dW: of a whole step over trees of tokens, in float64."""
    tiny = tiny.double()
    model = adapted(copy.deepcopy(tiny))
    tiny.load_state_dict(dict(weights_of(model)), strict=False)
    rows, _ = pack([make_sample(20, 4, seed=seed % 2) for seed in range(4)], 64, 1)
    found, metrics = gradients(model, rows[0], gradient_checkpointing=checkpointing)
    expected, of_merged = gradients(tiny, rows[0], share_prefixes=False)
    assert metrics["loss/mean"] == pytest.approx(of_merged["loss/mean"], rel=1e-6)
    assert metrics["tokens/forward"] < of_merged["tokens/forward"]
    matrices = dict(model.named_parameters())
    for name, gradient in found.items():
        assert matrices[name].requires_grad == ("lora_" in name) == (gradient is not None), name
    for layer in (name.removesuffix(".weight") for name in expected if name.endswith("_proj.weight")):
        names = [f"{layer}.lora_{side}.default.weight" for side in "AB"]
        right, left = (matrices[name].detach() for name in names)
        whole = expected[f"{layer}.weight"]
        for name, by_hand in zip(names, (3 * left.T @ whole, 3 * whole @ right.T)):
            assert by_hand.norm() > 0
            assert (found[name] - by_hand).norm() < 1e-5 * by_hand.norm(), name  # norms round to float32


def test_adapters_come_back_and_other_weights_are_refused(tiny, tmp_path):
    model = adapted(copy.deepcopy(tiny))
    save_weights(model, tmp_path, torch.float32)
    save_adapters(model, tmp_path / ADAPTER)
    config = json.loads((tmp_path / ADAPTER / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(LINEAR) and config["base_model_name_or_path"] == "base"
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (4, 12.0, True)
    again = adapted(copy.deepcopy(tiny), seed=1)
    load_adapters(again, tmp_path)
    expected = dict(model.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in again.named_parameters())
    with torch.no_grad():
        tiny.model.norm.weight[3] += 0.01
    with pytest.raises(ConfigError, match=r"model.norm.weight of model.path has other values than when the run began"):
        load_adapters(adapted(copy.deepcopy(tiny)), tmp_path)


@pytest.mark.parametrize("named", [["q_porj"], ["lm_head"], ["embed_tokens"], ["q_proj", "self_attn"], []])
def test_target_modules_that_cannot_have_an_adapter_are_refused(tiny, named):
    with pytest.raises(ConfigError, match=r"model.lora.target_modules.* this model has q_proj, k_proj"):
        check_targets(tiny, named)
