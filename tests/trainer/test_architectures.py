"""The architectures in the table of prl/trainer/README.md, as small random models: what is trained, what refused."""

import multiprocessing
import re
from pathlib import Path

import architectures
import peft
import pytest
import torch
from architectures import ARCHITECTURES, REFUSED, SERVED, TRAINED, config_of, give_adapters, samples, write_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from prl.compose import compose
from prl.errors import ConfigError
from prl.launch.builder import prepare
from prl.launch.shapes import build
from prl.orchestrator.packing import pack
from prl.trainer.architecture import check_architecture
from prl.trainer.attention import can_attend_over_trees
from prl.trainer.batch import stacks
from prl.trainer.lora import ADAPTER, save_adapters
from prl.trainer.model import check_layout, load_model, save_weights, stack_logprobs
from prl.trainer.tree import tree_stacks

README = Path(__file__).parents[2] / "prl" / "trainer" / "README.md"
both_heads = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
trained = pytest.mark.parametrize("name", TRAINED)


def loaded(folder, name, tied):
    return load_model(str(write_model(folder, name, tied=tied)), device=torch.device("cpu"))


@torch.no_grad()
@both_heads
@trained
def test_packed_and_shared_tokens_have_the_logprobs_of_sequences_alone(tmp_path, name, tied):
    """Those of transformers' own attention, without a mask of several sequences; windows are shorter than these."""
    model = loaded(tmp_path, name, tied)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    rows = pack(samples(), 64, 1)[0][0]
    assert can_attend_over_trees(model)
    for layout in (stacks, tree_stacks):
        check_layout(model, layout)
        total = 0
        for stack in layout(rows, 512, torch.device("cpu")):
            found, start = stack_logprobs(model, stack, head_chunk=None)[0], 0
            for length in stack.sequence_lengths:
                part = slice(start, start + length)
                ids, wanted = stack.token_ids[part], stack.wanted[part]
                logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1]
                expected = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)[wanted[1:]]
                assert expected.std() > 0.3, "tokens are not all as likely"
                assert (found[part][wanted] - expected).abs().max() < 1e-4
                start, total = start + length, total + len(expected)
        assert total == sum(sum(sample.mask) for sample in samples())


@both_heads
@trained
def test_published_and_saved_tensors_reload_exactly(tmp_path, name, tied):
    """Under the names of transformers' own files, in each format; a tied head is in none of them."""
    model = loaded(tmp_path / "model", name, tied)
    names = load_file(tmp_path / "model" / "model.safetensors").keys()
    own = model.state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        save_weights(model, tmp_path / "published", dtype)
        file = load_file(tmp_path / "published" / "model.safetensors")
        assert file.keys() == names and {each.dtype for each in file.values()} == {dtype}
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype="auto")
        assert type(again) is type(model)
        state = again.state_dict()
        assert state.keys() == own.keys()
        assert all(torch.equal(state[key], value.to(dtype)) for key, value in own.items())
        head, embedding = again.get_output_embeddings().weight, again.get_input_embeddings().weight
        assert (head is embedding) == tied == ("lm_head.weight" not in file) == torch.equal(head, embedding)


@both_heads
@trained
def test_adapters_are_merged_as_peft_merges_them(tmp_path, name, tied):
    model = give_adapters(loaded(tmp_path, name, tied))
    check_layout(model, tree_stacks)
    save_adapters(model, tmp_path / ADAPTER)
    save_weights(model, tmp_path / "merged", torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    expected = peft.PeftModel.from_pretrained(base, tmp_path / ADAPTER).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    changed = {key for key in found if not torch.equal(found[key], before[key])}
    assert changed == {key for key in found if key.endswith("_proj.weight")} and len(changed) >= 2 * 6


@pytest.mark.slow
def test_two_ranks_make_the_step_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in TRAINED:
        write_model(tmp_path / name, name, tied=TRAINED.index(name) % 2 == 0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["architectures"])
    ranks = [context.Process(target=architectures.main, args=(tmp_path, TRAINED, rank)) for rank in (0, 1)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(200)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    for name in TRAINED:
        before = load_file(tmp_path / name / "model.safetensors")
        trainer, metrics = architectures.step(tmp_path / name)
        save_weights(trainer.model, tmp_path / f"{name} of one", torch.float32)
        one, two = (load_file(tmp_path / f"{name} of {count}" / "model.safetensors") for count in ("one", "two"))
        assert metrics["grad_norm"] > 0.1 and one.keys() == two.keys() == before.keys()
        for key, value in one.items():
            assert not torch.equal(value, before[key]), key
            assert (two[key] - value).abs().max() < 2e-6, (name, key)  # a step moves weights by up to 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_go_wrong_is_refused_before_a_run_starts(tmp_path, name):
    """By its config: neither is it built nor are its weights read."""
    folder = write_model(tmp_path / "model", name, tied=True)
    with pytest.raises(ConfigError) as caught:
        prepare(compose(["run.name=x", "model=hf", f"model.path={folder}", "inference.device=cpu"]))
    assert ARCHITECTURES[name].refused in str(caught.value) and str(folder) in str(caught.value)
    with pytest.raises(ValueError, match=re.escape(ARCHITECTURES[name].refused)):
        load_model(str(folder), device=torch.device("cpu"))


def test_attention_sinks_are_refused_too_whatever_becomes_of_experts():
    """torch's attention has none."""
    with pytest.raises(ConfigError, match=r"no model can be built .*GptOssForCausalLM does not support .*scaled_dot"):
        build(config_of("gpt-oss", tied=True), "model.path='x'", trained=True)


def test_capped_attention_is_refused_where_the_logits_are_not_capped():
    config = config_of("Gemma 2", tied=True, final_logit_softcapping=None)
    with pytest.raises(
        ValueError, match=r"x: its config sets attn_logit_softcapping=50.0, a cap on attention's scores"
    ):
        check_architecture(config, "x")
    check_architecture(AutoConfig.for_model("gemma2", **vars(config) | {"attn_logit_softcapping": None}), "x")


def test_the_readme_has_what_is_tested_here():
    table = re.findall(r"^\| (.+) \|$", README.read_text().partition("## Architectures")[2].partition("\n## ")[0], re.M)
    cells = {row[0]: row[1:] for row in ([cell.strip() for cell in line.split(" | ")] for line in table[1:])}
    assert cells.keys() == ARCHITECTURES.keys()
    for name, row in cells.items():
        if refused := ARCHITECTURES[name].refused:
            assert row[0] == "refused" and refused.removeprefix("sets ").partition(" (")[0] in row[-1]
        else:
            assert row[:5] == ["yes", "tied, untied", "exact", "yes", "yes"] and row[5] == f"exact, {SERVED[name]}"
