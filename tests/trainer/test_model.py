"""The policy as a torch model, on real weights."""

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import rounding
import torch
from architectures import write_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from prl.models import model_path
from prl.trainer.batch import stacks
from prl.trainer.model import check_layout, load_model, save_weights, stack_logprobs
from prl.trainer.worker import HALF_TOLERANCE

LENGTHS = [9, 1, 14, 6]


@pytest.fixture(scope="module")
def sequences(sampled):
    """Token ids and temperatures of four sequences; one is a single token."""
    generator = torch.Generator().manual_seed(3)
    ids = [sampled[0][i, :n] for i, n in enumerate(LENGTHS)]
    return ids, [0.5 + torch.rand(n, generator=generator) for n in LENGTHS]


def token_logprobs(model, input_ids, position_ids, temperatures, wanted, *, head_chunk):
    """`stack_logprobs` of packed rows, `[rows, tokens]`; padding counts as a sequence of single tokens."""
    stack = SimpleNamespace(
        input_ids=input_ids,
        position_ids=position_ids,
        token_ids=input_ids.flatten(),
        before=torch.where(position_ids.flatten() > 0, torch.arange(input_ids.numel()) - 1, -1),
        temperatures=temperatures.flatten(),
        wanted=wanted.flatten(),
        tree=None,
    )
    return [values.view(input_ids.shape) for values in stack_logprobs(model, stack, head_chunk=head_chunk)]


def packed(sequences, padding=5):
    ids, temperatures = sequences
    tail = torch.zeros(padding, dtype=torch.int64)
    positions = torch.cat([torch.arange(len(part)) for part in ids] + [tail])
    return torch.cat([*ids, tail])[None], positions[None], torch.cat([*temperatures, torch.ones(padding)])[None]


def direct(model, ids, temperatures):
    """Logprobs and entropies of one sequence from the full logits, in float64; 0.0 at position 0."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double() / temperatures[1:, None].double()
    logp = logits.log_softmax(-1)
    zero = torch.zeros(1, dtype=torch.float64)
    picked = logp.gather(1, ids[1:, None]).squeeze(1)
    return torch.cat([zero, picked]), torch.cat([zero, -(logp.exp() * logp).sum(-1)])


@torch.no_grad()
def test_packed_logprobs_equal_direct_ones(tiny, sequences):
    ids, positions, temperatures = packed(sequences)
    select = torch.ones_like(ids, dtype=torch.bool)
    logprobs, entropy = token_logprobs(tiny, ids, positions, temperatures, select, head_chunk=8)
    expected = [direct(tiny, *pair) for pair in zip(*sequences, strict=True)]
    for found, column in ((logprobs, 0), (entropy, 1)):
        assert found.dtype == torch.float32 and found.shape == ids.shape
        reference = torch.cat([pair[column] for pair in expected])
        assert reference.abs().max() > 1  # not vacuous
        assert (found[0, : sum(LENGTHS)].double() - reference).abs().max() < rounding.of_model(tiny, reference)
        assert (found[0, sum(LENGTHS) :] == 0).all()


@torch.no_grad()
def test_packed_equals_unpacked_and_stacked(tiny, sequences):
    ids, positions, temperatures = packed(sequences)
    select = torch.ones_like(ids, dtype=torch.bool)
    row, _ = token_logprobs(tiny, ids, positions, temperatures, select, head_chunk=64)
    two, _ = token_logprobs(
        tiny, ids.repeat(2, 1), positions.repeat(2, 1), temperatures.repeat(2, 1), select.repeat(2, 1), head_chunk=64
    )
    alone = []
    for part, temperature in zip(*sequences, strict=True):
        args = part[None], torch.arange(len(part))[None], temperature[None], torch.ones(1, len(part), dtype=torch.bool)
        alone.append(token_logprobs(tiny, *args, head_chunk=64)[0])
    bound = rounding.of_model(tiny, row)
    assert (row[:, : sum(LENGTHS)] - torch.cat(alone, dim=1)).abs().max() < bound < 1e-3
    assert (two - row).abs().max() < bound


@torch.no_grad()
def test_position_zero_has_none(tiny, sequences):
    """The first token of a later sequence must not take its logprob from the sequence before it."""
    ids, positions, temperatures = packed(sequences)
    logprobs, entropy = token_logprobs(
        tiny, ids, positions, temperatures, torch.ones_like(ids, dtype=torch.bool), head_chunk=64
    )
    starts = [0, 9, 10, 24]
    assert logprobs[0, starts].tolist() == entropy[0, starts].tolist() == [0.0] * 4
    inside = [i for i in range(30) if i not in starts]
    assert (logprobs[0, inside] < 0).all()


def test_only_selected_tokens_and_their_gradient(tiny, sequences):
    ids, positions, temperatures = packed(sequences)
    select = torch.zeros_like(ids, dtype=torch.bool)
    select[0, [3, 12, 29]] = True
    logprobs, entropy = token_logprobs(tiny, ids, positions, temperatures, select, head_chunk=2)
    assert logprobs.nonzero()[:, 1].tolist() == [3, 12, 29] == entropy.nonzero()[:, 1].tolist()
    assert entropy.requires_grad
    logprobs.sum().backward()
    ours = {name: p.grad.clone() for name, p in tiny.named_parameters()}
    tiny.zero_grad()
    parts = [direct(tiny, *pair)[0] for pair in zip(*sequences, strict=True)]
    torch.cat(parts)[[3, 12, 29]].sum().backward()
    for name, p in tiny.named_parameters():
        assert (ours[name] - p.grad).norm() <= 1e-3 * p.grad.norm() + 1e-7, name


def test_nothing_selected_still_runs_backward(tiny, sequences):
    ids, positions, temperatures = packed(sequences)
    nothing = torch.zeros_like(ids, dtype=torch.bool)
    logprobs, entropy = token_logprobs(tiny, ids, positions, temperatures, nothing, head_chunk=64)
    assert not logprobs.any() and not entropy.any()
    logprobs.sum().backward()
    for name, p in tiny.named_parameters():
        assert p.grad is not None and not p.grad.any(), name


def test_check_layout_passes(tiny):
    check_layout(tiny, stacks)


@pytest.mark.parametrize("change", [{"position_ids": None}, {"use_cache": True}], ids=["positions", "cache"])
def test_check_layout_refuses_a_model_whose_sequences_see_each_other(tiny, monkeypatch, change):
    real = tiny.base_model.forward
    monkeypatch.setattr(tiny.base_model, "forward", lambda **kwargs: real(**(kwargs | change)))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: packed sequences see each other"):
        check_layout(tiny, stacks)


@pytest.mark.parametrize("wrong, draws", [((), 1), ((0,), 3), ((0, 1), 2), ((0, 2), 3)])
def test_check_layout_refuses_what_is_wrong_in_two_draws(tiny, monkeypatch, wrong, draws):
    seeds = []

    def fault_of_layout(*args):
        seeds.append(args[4])
        return ": wrong" if args[4] in wrong else None

    monkeypatch.setattr("prl.trainer.model._fault_of_layout", fault_of_layout)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: wrong") if len(wrong) > 1 else contextlib.nullcontext():
        check_layout(tiny, stacks)
    assert seeds == list(range(draws))


@torch.no_grad()
def test_check_layout_tells_rounding_from_a_fault_in_a_mixture_of_experts(tmp_path, monkeypatch):
    """In bfloat16, where tokens of a draw may find other experts: logprobs of the first were off by 0.61."""
    mixture = load_model(str(write_model(tmp_path, "gpt-oss", tied=False)), device=torch.device("cpu")).bfloat16()
    check_layout(mixture, stacks, tolerance=HALF_TOLERANCE)
    real = mixture.base_model.forward
    ignoring = {"position_ids": None, "attention_mask": None}
    monkeypatch.setattr(mixture.base_model, "forward", lambda **kwargs: real(**(kwargs | ignoring)))
    with pytest.raises(ValueError, match="GptOssForCausalLM: packed sequences see each other"):
        check_layout(mixture, stacks, tolerance=HALF_TOLERANCE)


def test_check_layout_refuses_nan(tiny, monkeypatch):
    with torch.no_grad():
        tiny.base_model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="packed"):
        check_layout(tiny, stacks)


def test_load_model_keeps_float32_master_weights(tiny):
    assert {p.dtype for p in tiny.parameters()} == {torch.float32}
    assert tiny.training


def test_save_weights_of_a_tied_model(tiny, tmp_path, sequences):
    with torch.no_grad():
        tiny.model.embed_tokens.weight.mul_(1.01)  # not what the folder it came from holds
    save_weights(tiny, tmp_path, torch.float32)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "lm_head.weight" not in names
    assert names == set(tiny.state_dict()) - {"lm_head.weight"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    for name, value in tiny.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    ids = sequences[0][2][None]
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, tiny.eval()(ids).logits)


def test_the_config_beside_weights_is_the_models(tiny, tmp_path, tiny_path):
    untied = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_path, tie_word_embeddings=False))
    for model in (tiny, untied, tiny):  # in turns: what is remembered is of the last one
        save_weights(model, tmp_path / "weights", torch.float32)
        model.config.save_pretrained(tmp_path)
        assert (tmp_path / "weights/config.json").read_bytes() == (tmp_path / "config.json").read_bytes()


def test_save_weights_of_an_untied_model_keeps_the_head(tmp_path, tiny_path):
    config = AutoConfig.from_pretrained(tiny_path, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    save_weights(model, tmp_path, torch.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))
    assert not torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)


@pytest.mark.parametrize(
    "name, value, refused",
    [
        ("final_logit_softcapping", 30.0, True),
        ("logit_scale", 0.25, True),
        ("logits_scaling", 8.0, True),
        ("logits_scaling", 1.0, False),
        ("final_logit_softcapping", None, False),
    ],
)
def test_logit_transforms(tmp_path, tiny_path, name, value, refused):
    folder = tmp_path / "model"
    shutil.copytree(tiny_path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: value}))
    if refused:
        with pytest.raises(ValueError, match=name):
            load_model(str(folder), device=torch.device("cpu"))
    else:
        load_model(str(folder), device=torch.device("cpu"))


def test_a_model_that_scales_its_logits_is_noticed(tiny):
    forward = tiny.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out

    check_layout(tiny, stacks)
    tiny.forward = scaled
    with pytest.raises(ValueError, match="changes its logits after the head"):
        check_layout(tiny, stacks)


@pytest.fixture
def damaged(tmp_path):
    """`damaged(change)`: a copy of the tiny model whose tensors `change` has changed."""

    def make(change):
        folder = Path(shutil.copytree(model_path("tiny"), tmp_path / "damaged"))
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return make


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_called_that_with_the_tensor(damaged, value):
    def change(tensors):
        for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
            tensors[name].view(-1)[-1] = value

    folder = damaged(change)
    with pytest.raises(ValueError) as caught:
        load_model(folder, device=torch.device("cpu"))
    assert str(caught.value) == (
        f"{folder} holds weights that are not finite (NaN or infinite), in model.layers.1.mlp.up_proj.weight and 1 more"
    )


def test_weights_that_are_missing_are_not_made_up(damaged):
    folder = damaged(lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"has no weights for model\.norm\.weight$"):
        load_model(folder, device=torch.device("cpu"))


@pytest.mark.parametrize("other_kind", [False, True])
def test_a_layer_beyond_those_of_the_config_is_not_left_out_unless_it_is_of_another_kind(damaged, other_kind):
    def add(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            tensors[name.replace("layers.3.", "layers.4.")] = tensors[name].clone()
        if other_kind:  # as one that predicts a second token
            tensors["model.layers.4.eh_proj.weight"] = torch.zeros(2, 2)

    folder = damaged(add)
    if other_kind:
        load_model(folder, device=torch.device("cpu"))
        return
    with pytest.raises(ValueError, match=r"model\.layers\.4, a layer beyond"):
        load_model(folder, device=torch.device("cpu"))


def test_weights_of_another_shape_are_refused_in_one_line(damaged):
    folder = damaged(lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight has shape \[3\] in its weights and \[128\] by its config"
    ):
        load_model(folder, device=torch.device("cpu"))
