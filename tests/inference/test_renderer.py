"""Making a renderer: the right one, or a message with the key."""

from typing import get_args

import pytest
from renderers import RendererConfig

from prl.compose import CONF, compose
from prl.errors import ConfigError
from prl.inference.renderer import make_renderer, renderer_config

FAMILIES = sorted(variant.model_fields["name"].default for variant in get_args(get_args(RendererConfig)[0]))
"""The renderers that the package ships."""
OF_THE_TINY_TOKENIZER = {"auto", "default", "qwen3", "prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"}
"""Those that find their special tokens in it."""


def test_a_renderer_by_name_with_its_settings(tokenizer):
    plain = make_renderer(tokenizer, "qwen3", {})
    keeping = make_renderer(tokenizer, "qwen3", {"thinking_retention": "all"})
    assert type(plain).__name__ == type(keeping).__name__ == "Qwen3Renderer"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in plain.get_stop_token_ids()


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("qwen33", {}, "renderer.name:"),
        ("qwen3", {"thinking_retentoin": "all"}, "renderer.args.thinking_retentoin:"),
        ("qwen3", {"thinking_retention": "some"}, "renderer.args.thinking_retention:"),
        ("custom", {}, "renderer.args.import_path:"),
        ("custom", {"import_path": "no_such_module.Mine"}, "renderer.args.import_path:"),
        ("custom", {"import_path": "no_such_file.py:Mine"}, "renderer.args.import_path:"),
        ("custom", {"import_path": "renderers.qwen3.Mine"}, "renderer.args.import_path:"),
        ("custom", {"import_path": "renderers.qwen3.Qwen3Renderer"}, "renderer.args.import_path:"),
    ],
)
def test_what_does_not_exist_is_refused_by_its_key(tokenizer, name, args, key):
    with pytest.raises(ConfigError) as caught:
        make_renderer(tokenizer, name, args)
    assert str(caught.value).startswith(key)


def test_a_renderer_that_does_not_fit_the_tokenizer_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="renderer.name=llama-3 does not fit this model's tokenizer"):
        make_renderer(tokenizer, "llama-3", {})


def test_the_group_has_every_renderer_of_the_package_under_its_own_name():
    assert sorted(path.name.removesuffix(".yaml") for path in (CONF / "renderer").iterdir()) == FAMILIES


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"custom"}))
def test_an_option_of_the_group_is_the_packages_own_config(name):
    config = compose(["run.name=x", f"renderer={name}"]).renderer
    assert (config.name, config.args) == (name, {})
    assert renderer_config(config.name, config.args).name == name


@pytest.fixture
def own_tokenizer():
    """A fresh one each time: making a renderer wraps its `encode`."""
    from transformers import AutoTokenizer

    from prl.models import model_path

    return AutoTokenizer.from_pretrained(model_path("tiny"), local_files_only=True)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"custom"}))
def test_a_family_either_fits_the_tokenizer_or_is_refused_by_name(own_tokenizer, name, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))  # gpt-oss would fetch its vocabulary
    if name in OF_THE_TINY_TOKENIZER:
        made = make_renderer(own_tokenizer, name, {})
        ids = made.render([{"role": "user", "content": "1+1="}], add_generation_prompt=True).token_ids
        assert max(ids) < len(own_tokenizer) and "1+1=" in own_tokenizer.decode(ids)
        return
    with pytest.raises(
        ConfigError, match=f"^renderer.name={name} (does not fit this model's tokenizer|cannot be made): "
    ):
        make_renderer(own_tokenizer, name, {})


def test_a_renderer_of_ones_own(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "my_renderers.py").write_text(
        "from renderers.configs import Qwen3RendererConfig\n"
        "from renderers.qwen3 import Qwen3Renderer\n"
        "class Mine(Qwen3Renderer):\n"
        "    config_class = Qwen3RendererConfig\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    overrides = [
        "renderer=custom",
        "renderer.args.import_path=my_renderers.Mine",
        "+renderer.args.enable_thinking=false",
    ]
    config = compose(["run.name=x", *overrides]).renderer
    made = make_renderer(tokenizer, config.name, config.args)
    assert type(made).__name__ == "Mine" and made.config.enable_thinking is False
