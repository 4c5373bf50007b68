"""The committed model that sees: its size and format, and that it has the words but does not say what it sees."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from seeing_models import part, text
from tiny_models import sighted
from transformers import Qwen3VLForConditionalGeneration

from prl import models
from prl.engines.pictures import PictureProcessor
from prl.engines.renderer import input_of, make_renderer, render_prompt
from prl.engines.tokenizers import load_tokenizer
from prl.rollouts.pictures import PictureStore

FOLDER = Path(models.__file__).parent / "tiny_vl"
SKIPPED = {"type": "image"}


@pytest.fixture(scope="module")
def model():
    return Qwen3VLForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(FOLDER), "model.path")


@pytest.fixture
def renderer(tokenizer, tmp_path):
    pictures = PictureProcessor(str(FOLDER), tokenizer, PictureStore(tmp_path))
    return make_renderer(tokenizer, name="qwen3-vl", pictures=pictures)


def test_weights_are_bfloat16_tied_and_small_enough_to_commit(model):
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 2_500_000
    with safe_open(path, "pt") as weights:
        names = list(weights.keys())
        assert not any("lm_head" in name for name in names)
        assert {weights.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


def test_generation_config_hides_no_sampling_settings():
    settings = json.loads((FOLDER / "generation_config.json").read_text())
    assert settings.keys() == {"eos_token_id", "pad_token_id", "transformers_version"}


def test_its_tokens_are_tinys_and_four_more(tokenizer, model):
    tiny = load_tokenizer(str(FOLDER.with_name("tiny")), "model.path")
    assert tokenizer.get_vocab().items() >= tiny.get_vocab().items()
    assert tokenizer.get_vocab().keys() - tiny.get_vocab().keys() == set(sighted.VISION)
    assert len(tokenizer) <= model.config.text_config.vocab_size == 304


@pytest.mark.parametrize(
    ("width", "height", "length"), [(48, 48, 9), (16, 16, 1), (5, 5, 1), (64, 32, 8), (512, 512, 256)]
)
def test_a_picture_takes_a_placeholder_for_each_16_pixels_squared(renderer, width, height, length):
    """At most 256 by 256 pixels, to which a larger one is made smaller."""
    reference = f"picture:{renderer.pictures.store.keep(Image.new('RGB', (width, height), 'red'))}"
    [found] = input_of(render_prompt(renderer, [{"role": "user", "content": [part(reference)]}])).pictures
    assert found.length == length


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}}}
CONVERSATIONS = {
    "text": [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "12+34="}],
    "picture": [{"role": "user", "content": [SKIPPED, text("Which digit?"), SKIPPED]}],
    "turns": [
        {"role": "user", "content": [text("Look: "), SKIPPED]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "and?"},
    ],
    "tools": [
        {"role": "user", "content": "draw"},
        {"role": "assistant", "content": "so", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": [text("here: "), SKIPPED]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": [SKIPPED]},
    ],
}


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_renderer_equals_chat_template(tokenizer, renderer, name, tools):
    reference = f"picture:{renderer.pictures.store.keep(Image.new('RGB', (16, 16)))}"
    shown = [
        message | {"content": [part(reference) if each is SKIPPED else each for each in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in CONVERSATIONS[name]
    ]
    rendered = render_prompt(renderer, shown, tools=tools).token_ids
    assert rendered == tokenizer.apply_chat_template(
        CONVERSATIONS[name], tools=tools, add_generation_prompt=True, return_dict=False
    )


def test_it_knows_the_words_and_answers_by_chance(model, tokenizer):
    rows = sighted.figures(model, sighted.Lessons("eval", 200, 0, tokenizer))
    assert len(rows) == 4
    for right, known, greedy in rows.values():
        assert 0.12 < right < 0.3
        assert known > 0.9
        assert greedy < 0.6
