"""The architectures of experiments/benchmarks/architectures.md as small random models: what trains, what is refused."""

import contextlib
import copy
import re
from pathlib import Path

import architectures
import forking
import pytest
import rounding
import torch
from architectures import (
    ARCHITECTURES,
    MIXTURES,
    REFUSED,
    SERVED,
    SIZES,
    TRAINED,
    config_of,
    give_adapters,
    samples,
    step,
    write_model,
)
from prepared_run import prepared_run
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.config.tensor_names import check_names
from prl.engines.vllm.weights import policy_tensors
from prl.rollouts.packing import pack
from prl.trainer.architecture import check_architecture
from prl.trainer.batch import stacks
from prl.trainer.layers import KEPT
from prl.trainer.lora import ADAPTER, adapters_alone, save_adapters
from prl.trainer.model import check_layout, load_model, save_weights, stack_logprobs
from prl.trainer.tree.attention import can_attend_over_trees
from prl.trainer.tree.tree import tree_stacks

PAGE = Path(__file__).parents[2] / "experiments" / "benchmarks" / "architectures.md"
trained = pytest.mark.parametrize("name", TRAINED)
# Of each, one head takes steps and the other is published: transformers ties all in one way.
HEADS = [(name, place % 2 == 0) for place, name in enumerate(TRAINED)]
OTHER_HEADS = [(name, not tied) for name, tied in HEADS]


def loaded(folder, name, tied):
    return load_model(str(write_model(folder, name, tied=tied)), device=torch.device("cpu"))


@pytest.mark.parametrize(("name", "tied"), HEADS)
def test_packed_and_shared_tokens_equal_sequences_alone(tmp_path, name, tied):
    """Those of transformers' own attention, without a mask of several sequences; windows are shorter than these.

    And of its experts one after the other.
    """
    model = loaded(tmp_path, name, tied)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **eager)
    rows = pack(samples(), 64, 1)[0][0]
    assert can_attend_over_trees(model)
    for layout in (stacks, tree_stacks):
        check_layout(model, layout)
        model.zero_grad()
        plain.zero_grad()
        total = 0
        for stack in layout(rows, 512, torch.device("cpu")):
            found, start = stack_logprobs(model, stack, head_chunk=None)[0], 0
            (found * stack.streams["advantages"]).sum().backward()
            for length in stack.sequence_lengths:
                part = slice(start, start + length)
                ids, wanted = stack.token_ids[part], stack.wanted[part]
                logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1]
                expected = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)[wanted[1:]]
                assert expected.std() > 0.3, "tokens are not all as likely"
                assert (found[part][wanted] - expected).abs().max() < rounding.of_model(plain, expected)
                (expected * stack.streams["advantages"][part][wanted]).sum().backward()
                start, total = start + length, total + len(expected)
        assert total == sum(sum(sample.mask) for sample in samples())
        for key, parameter in plain.named_parameters():
            gap = (model.get_parameter(key).grad - parameter.grad).norm()
            assert 0 <= gap < 1e-5 * parameter.grad.norm(), key


@pytest.mark.parametrize(("name", "tied"), OTHER_HEADS)
def test_published_tensors_are_those_of_transformers_own_files(tmp_path, name, tied):
    """Under the same names, in each format, bit by bit; a tied head is in none of them."""
    model = loaded(tmp_path / "model", name, tied)
    own = model.state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        save_weights(model, tmp_path / "published", dtype)
        file = load_file(tmp_path / "published" / "model.safetensors")
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype).save_pretrained(tmp_path / "expected")
        expected = load_file(tmp_path / "expected" / "model.safetensors")
        assert file.keys() == expected.keys() and dtype in {each.dtype for each in file.values()}
        assert all(file[key].dtype == each.dtype and torch.equal(file[key], each) for key, each in expected.items())
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype="auto")
        assert type(again) is type(model)
        state = again.state_dict()
        assert state.keys() == own.keys()
        kept = {key: value if "correction_bias" in key else value.to(dtype) for key, value in own.items()}
        assert all(torch.equal(state[key], value) for key, value in kept.items())
        head, embedding = again.get_output_embeddings().weight, again.get_input_embeddings().weight
        assert (head is embedding) == tied == ("lm_head.weight" not in file) == torch.equal(head, embedding)


def test_tensor_made_of_several_of_its_file_is_refused(tmp_path, monkeypatch):
    model = loaded(tmp_path, "Qwen3", True)
    halves = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    model._weight_conversions = [WeightConverter("mlp.both.weight", halves, operations=[Chunk(dim=0)])]
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM: .*mlp.both.weight of its files is made of"):
        check_names(copy.deepcopy(model))


@trained
def test_adapters_are_merged_as_peft_merges_them(tmp_path, name):
    import peft  # takes .4 s, of each process that collects tests

    model = give_adapters(loaded(tmp_path, name, tied=name in MIXTURES))
    check_layout(model, tree_stacks)
    save_adapters(model, tmp_path / ADAPTER)
    save_weights(model, tmp_path / "merged", torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    expected = peft.PeftModel.from_pretrained(base, tmp_path / ADAPTER).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    if adapters_alone(model):  # an engine that adds them to the files of the base gets the same
        merged = load_file(tmp_path / "merged" / "model.safetensors")
        added = dict(policy_tensors(str(tmp_path / ADAPTER), tmp_path))
        assert all(torch.equal(added[key], merged[key]) for key in merged)
    changed = {key for key in found if not torch.equal(found[key], before[key])}
    attention = {key for key in found if re.search(r"\.[qkvo]_proj\.weight$", key)}
    dense = {key for key in found if key.endswith("_proj.weight")} - attention
    assert changed == (attention if name in MIXTURES else attention | dense) and len(attention) == 2 * 4


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_that_are_computed_again_have_the_same_gradients(tmp_path, name):
    """`selective` does not run them twice: they are matrix products."""
    write_model(tmp_path, name, tied=True)
    found = {}
    for how in ("none", "selective", "full"):
        trainer, _ = step(tmp_path, gradient_checkpointing=how)
        found[how] = {key: parameter.grad for key, parameter in trainer.model.named_parameters()}
    for how in ("selective", "full"):
        assert all(torch.equal(found[how][key], grad) for key, grad in found["none"].items())
    assert torch.ops.aten._grouped_mm.default in KEPT


@torch.no_grad()
def test_the_inputs_of_experts_have_no_noise(tmp_path):
    """Mixtral's have it in training, as its config says; the engine has none."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_local_experts": 8, "router_jitter_noise": 0.3, "attention_dropout": 0.3}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes)).save_pretrained(tmp_path)
    ids = torch.tensor([samples()[0].token_ids])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = load_model(str(tmp_path), device=torch.device("cpu"))
    assert model.training and plain.train()(input_ids=ids).logits.sub(model(input_ids=ids).logits).abs().max() > 0.1
    logits = plain.eval()(input_ids=ids).logits
    assert logits.sub(model(input_ids=ids).logits).abs().max() < rounding.of_model(plain, logits)


@pytest.mark.slow
def test_experts_over_two_ranks_step_as_one_process(tmp_path, monkeypatch):
    """A rank has experts that no token of the other's goes to."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in MIXTURES:
        write_model(tmp_path / name, name, tied=MIXTURES.index(name) % 2 == 0)
    assert forking.exit_codes(architectures.main, [(tmp_path, MIXTURES, rank) for rank in (0, 1)], 200) == [0, 0]
    for name in MIXTURES:
        before = load_file(tmp_path / name / "model.safetensors")
        trainer, metrics = architectures.step(tmp_path / name)
        save_weights(trainer.model, tmp_path / f"{name} of one", torch.float32)
        one, two = (load_file(tmp_path / f"{name} of {count}" / "model.safetensors") for count in ("one", "two"))
        assert metrics["grad_norm"] > 0.1 and one.keys() == two.keys() == before.keys()
        changed = {key for key, value in one.items() if not torch.equal(value, before[key])}
        assert any(".experts." in key for key in changed)
        for key, value in one.items():
            assert ".experts." in key or key.endswith("e_score_correction_bias") or key in changed, key
            assert (two[key] - value).abs().max() < 2e-6, (name, key)  # a step moves weights by up to 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architecture_is_refused_before_a_run_starts(tmp_path, name):
    """By its config: neither is it built nor are its weights read."""
    folder = write_model(tmp_path / "model", name, tied=True)
    with pytest.raises(ConfigError) as caught:
        prepared_run(compose(["run.name=x", "model=hf", f"model.path={folder}", "engine.device=cpu"]))
    assert ARCHITECTURES[name].refused in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen3", {"logit_scale": 0.25}, "sets logit_scale"),
        ("Qwen3", {"logits_scaling": 8.0}, "sets logits_scaling"),
        ("Qwen3", {"logits_scaling": 1.0}, None),
        ("Gemma 2", {"final_logit_softcapping": None}, "attn_logit_softcapping=50.0, a cap on attention's scores"),
        ("Gemma 2", {"final_logit_softcapping": None, "attn_logit_softcapping": None}, None),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, r"quantised \(mxfp4\), which the trainer"),
    ],
)
def test_configs_that_the_trainer_takes_and_refuses(name, changes, message):
    config = config_of(name, tied=True, **changes)
    with pytest.raises(ValueError, match=f"^x: .*{message}") if message else contextlib.nullcontext():
        check_architecture(config, "x")


def test_the_page_has_what_is_tested_here():
    table = re.findall(r"^\| (.+) \|$", PAGE.read_text(), re.M)
    cells = {row[0]: row[1:] for row in ([cell.strip() for cell in line.split(" | ")] for line in table[1:])}
    assert cells.keys() == ARCHITECTURES.keys()
    for name, row in cells.items():
        if refused := ARCHITECTURES[name].refused:
            assert row[0] == "refused" and refused.removeprefix("sets ").partition(" (")[0] in row[-1]
        else:
            adapters = "of attention" if name in MIXTURES else "yes"
            assert row[:5] == ["yes", "tied, untied", "exact", adapters, "yes"]
            assert row[5].partition(";")[0] == f"exact, {SERVED[name]}"
