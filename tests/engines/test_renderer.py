"""Making a renderer: the right one, or a message with the key."""

import base64
import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from renderers import RendererConfig as PackageConfig

from prl.base.errors import ConfigError
from prl.config.build import maker, plain
from prl.config.compose import options
from prl.engines.renderer import RendererConfig, make_renderer
from prl.engines.tokenizers import Remembering

PAGE = Path(__file__).parents[2] / "experiments" / "benchmarks" / "renderers.md"
FAMILIES = sorted(variant.model_fields["name"].default for variant in get_args(get_args(PackageConfig)[0]))
"""The renderers that the package ships."""
OF_THE_TINY_TOKENIZER = {"auto", "default", "qwen3", "prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"}
"""Those that find their special tokens in it."""


def test_a_renderer_by_name_with_its_settings(tokenizer):
    plain = make_renderer(tokenizer, name="qwen3")
    keeping = make_renderer(tokenizer, name="qwen3", thinking_retention="all")
    assert type(plain).__name__ == type(keeping).__name__ == "Qwen3Renderer"
    assert (plain.config.thinking_retention, keeping.config.thinking_retention) == (None, "all")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in plain.get_stop_token_ids()


REFUSED = [
    ("qwen33", {}, ".name:"),
    ("qwen3", {"thinking_retentoin": "all"}, ".thinking_retentoin:"),
    ("qwen3", {"thinking_retention": "some"}, ".thinking_retention:"),
    ("custom", {}, ".import_path:"),
    ("custom", {"import_path": "no_such_module.Mine"}, ".import_path:"),
    ("custom", {"import_path": "renderers.qwen3.Qwen3Renderer"}, ".import_path:"),
]


@pytest.mark.parametrize(("name", "settings", "key"), REFUSED)
@pytest.mark.parametrize("where", ["renderer", "envs.math.renderer"])
def test_what_does_not_exist_is_refused_by_its_key(tokenizer, name, settings, key, where):
    with pytest.raises(ConfigError) as caught:
        make_renderer(tokenizer, name=name, where=where, **settings)
    assert str(caught.value).startswith(where + key)


def test_a_name_that_another_key_chose_is_refused_by_that_one(tokenizer):
    for name, says in (("qwen33", "model.renderer: "), ("llama-3", "model.renderer=llama-3 does not fit")):
        with pytest.raises(ConfigError, match=f"^{says}"):
            make_renderer(tokenizer, name=name, name_key="model.renderer")
    with pytest.raises(ConfigError, match=r"^renderer\.no_such: "):
        make_renderer(tokenizer, name="qwen3", name_key="model.renderer", no_such=1)


def test_a_renderer_that_does_not_fit_the_tokenizer_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="renderer.name=llama-3 does not fit this model's tokenizer"):
        make_renderer(tokenizer, name="llama-3")


def test_every_renderer_of_the_package_is_an_option():
    assert sorted(options()["renderer"]) == FAMILIES


def composed(**settings):
    """The function that a config node makes of a tokenizer."""
    return maker(plain(RendererConfig()) | settings, Callable, "renderer")


def test_the_node_takes_the_renderers_own_settings_beside_the_name(tokenizer):
    assert type(composed(name="qwen3")(tokenizer)).__name__ == "Qwen3Renderer"
    made = composed(name="qwen3", thinking_retention="all")(tokenizer)
    assert made.config.thinking_retention == "all"
    assert type(composed()(tokenizer)).__name__ == "TemplateRenderer", "auto, of a local path"
    assert type(composed()(tokenizer, name="qwen3")).__name__ == "Qwen3Renderer", "as model.renderer says"


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"custom"}))
def test_a_family_either_fits_the_tokenizer_or_is_refused_by_name(tokenizer, name):
    if name in OF_THE_TINY_TOKENIZER:
        made = make_renderer(tokenizer, name=name)
        ids = made.render([{"role": "user", "content": "1+1="}], add_generation_prompt=True).token_ids
        assert max(ids) < len(tokenizer) and "1+1=" in tokenizer.decode(ids)
        return
    with pytest.raises(ConfigError, match=f"^renderer.name={name} does not fit this model's tokenizer: "):
        make_renderer(tokenizer, name=name)


def test_the_page_says_what_becomes_of_every_family():
    table = PAGE.read_text().partition("## Renderers of a family")[2].partition("\n## ")[0]
    named = [
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall("`(.+?)`", line.split("|")[1])
    ]
    assert {*named} == {*FAMILIES} - {"auto", "custom", "default"}


def test_gpt_oss_has_its_vocabulary_from_the_models_tokenizer(tokenizer, monkeypatch, tmp_path):
    """In the file of its encoder, which has bytes and numbers, and would be downloaded."""
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))  # of the user
    read = {}

    def load(name):
        lines = (Path(os.environ["TIKTOKEN_ENCODINGS_BASE"]) / "o200k_base.tiktoken").read_bytes().splitlines()
        read.update((base64.b64decode(word), int(number)) for word, number in (line.split() for line in lines))
        raise RuntimeError("another hash")

    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", load)
    with pytest.raises(ConfigError, match=r"tokenizer: its vocabulary is not that of gpt-oss \(another hash\)"):
        make_renderer(tokenizer, name="gpt-oss")
    assert os.environ["TIKTOKEN_ENCODINGS_BASE"] == str(tmp_path)
    assert sorted(read.values()) == list(read.values()) == list(range(len(read))) and len(read) == 256
    for word, number in read.items():
        if word.isascii():
            assert tokenizer.decode([number]) == word.decode()


def test_a_renderer_of_ones_own(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "my_renderers.py").write_text(
        "from renderers.configs import Qwen3RendererConfig\n"
        "from renderers.qwen3 import Qwen3Renderer\n"
        "class Mine(Qwen3Renderer):\n"
        "    config_class = Qwen3RendererConfig\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = composed(name="custom", import_path="my_renderers.Mine", enable_thinking=False)(tokenizer)
    assert type(made).__name__ == "Mine" and made.config.enable_thinking is False


def test_a_remembering_tokenizer_is_the_tokenizer(tokenizer):
    once = Remembering(tokenizer)
    for text in ("<|im_start|>assistant\n", "12+34=", "x" * 200):
        for given in ({}, {"add_special_tokens": False}):
            first = once.encode(text, **given)
            first.append(0)  # the reader's own list
            assert once.encode(text, **given) == tokenizer.encode(text, **given) == first[:-1]
    again = copy.deepcopy(once)
    assert again.encode("12") == again("12")["input_ids"] == tokenizer.encode("12") and len(again) == len(tokenizer)
