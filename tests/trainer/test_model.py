"""The policy as a torch model, on real weights."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import rounding
import torch
from architectures import write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl.config.model_folder import companion_files
from prl.config.trainer import BFLOAT16
from prl.models import model_path
from prl.trainer.batch import stacks
from prl.trainer.model import check_layout, load_model, save_weights, stack_logprobs

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
    """In each of two rows; the first token of a sequence, and padding, has none."""
    ids, positions, temperatures = (values.repeat(2, 1) for values in packed(sequences))
    select = torch.ones_like(ids, dtype=torch.bool)
    logprobs, entropy = token_logprobs(tiny, ids, positions, temperatures, select, head_chunk=8)
    expected = [direct(tiny, *pair) for pair in zip(*sequences, strict=True)]
    for found, column in ((logprobs, 0), (entropy, 1)):
        assert found.dtype == torch.float32 and found.shape == ids.shape
        reference = torch.cat([pair[column] for pair in expected])
        assert reference.abs().max() > 1  # not vacuous
        assert (found[:, : sum(LENGTHS)].double() - reference).abs().max() < rounding.of_model(tiny, reference) < 1e-3
        assert (found[:, sum(LENGTHS) :] == 0).all() and (found[:, [0, 9, 10, 24]] == 0).all()


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


@pytest.mark.parametrize("change", [{"position_ids": None}, {"use_cache": True}], ids=["positions", "cache"])
def test_check_layout_refuses_sequences_that_see_each_other(tiny, monkeypatch, change):
    real = tiny.base_model.forward
    monkeypatch.setattr(tiny.base_model, "forward", lambda **kwargs: real(**(kwargs | change)))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: packed sequences see each other"):
        check_layout(tiny, stacks)


@torch.no_grad()
def test_check_layout_allows_rounding_of_a_mixture_of_experts(tmp_path, monkeypatch):
    """In bfloat16, where tokens of a draw may find other experts: logprobs of the first were off by 0.61."""
    mixture = load_model(str(write_model(tmp_path, "gpt-oss", tied=False)), device=torch.device("cpu")).bfloat16()
    check_layout(mixture, stacks, tolerance=BFLOAT16.tolerance)
    real = mixture.base_model.forward
    ignoring = {"position_ids": None, "attention_mask": None}
    monkeypatch.setattr(mixture.base_model, "forward", lambda **kwargs: real(**(kwargs | ignoring)))
    with pytest.raises(ValueError, match="GptOssForCausalLM: packed sequences see each other"):
        check_layout(mixture, stacks, tolerance=BFLOAT16.tolerance)


def test_check_layout_refuses_nan(tiny, monkeypatch):
    with torch.no_grad():
        tiny.base_model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="logprobs are not finite, as where weights are NaN"):
        check_layout(tiny, stacks)


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


CONFIGURATION = "from transformers import {base}Config\nclass MineConfig({base}Config):\n    model_type = 'mine'\n"
MODELING = (
    "from transformers import {base}ForCausalLM\nfrom .configuration_mine import MineConfig\nfrom .parts import WIDTH\n"
    "class MineForCausalLM({base}ForCausalLM):\n    config_class = MineConfig\n"
)


@pytest.mark.parametrize("folder", ["", "code/"])
def test_a_written_model_has_its_code_processors_and_ends(tmp_path, folder):
    source, out = Path(shutil.copytree(model_path("tiny"), tmp_path / "own")), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    base = config["architectures"][0].removesuffix("ForCausalLM")
    (source / folder).mkdir(exist_ok=True)
    files = {"configuration_mine": CONFIGURATION, "modeling_mine": MODELING, "parts": "WIDTH = 1\n"}
    for name, text in files.items():
        (source / folder / f"{name}.py").write_text(text.format(base=base))
    (source / "preprocessor_config.json").write_text('{"size": 3}')
    auto_map = {"AutoConfig": f"{folder}configuration_mine.MineConfig"}
    auto_map["AutoModelForCausalLM"] = f"{folder}modeling_mine.MineForCausalLM"
    config |= {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": auto_map}
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text('{"eos_token_id": 258}')
    model = load_model(str(source), device=torch.device("cpu"), trust_remote_code=True, ends=[7, 10**6])
    files = companion_files(str(source))
    shutil.rmtree(source)
    save_weights(model, out, torch.float32, files)
    again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert type(again).__name__ == "MineForCausalLM"
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert again.generation_config.eos_token_id == [258, 7], "those of tokens that the model has"
    assert (out / "preprocessor_config.json").read_text() == '{"size": 3}'


@pytest.mark.parametrize("declared", [None, {}, {"eos_token_id": []}, {"eos_token_id": 5}])
def test_a_model_names_the_ends_of_its_chat_template(tmp_path, declared):
    source = Path(shutil.copytree(model_path("tiny"), tmp_path / "own"))
    (source / "generation_config.json").unlink(missing_ok=True)
    if declared is not None:
        (source / "generation_config.json").write_text(json.dumps(declared))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(source)
    named = load_model(str(source), device=torch.device("cpu")).generation_config.eos_token_id
    assert set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])) <= set(named)


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


def with_further_layer(tensors):
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        tensors[name.replace("layers.3.", "layers.4.")] = tensors[name].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"has no weights for model\.norm\.weight$"),
        (with_further_layer, r"model\.layers\.4, a layer beyond"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}),
            r"model\.norm\.weight has shape \[3\] in its weights and \[128\] by its config",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(damaged, change, message):
    with pytest.raises(ValueError, match=message):
        load_model(damaged(change), device=torch.device("cpu"))


def test_a_layer_of_another_kind_may_be_left_out(damaged):
    """As one that predicts a second token."""

    def add(tensors):
        with_further_layer(tensors)
        tensors["model.layers.4.eh_proj.weight"] = torch.zeros(2, 2)

    load_model(damaged(add), device=torch.device("cpu"))
