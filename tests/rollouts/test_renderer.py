"""Making a renderer: the right one, or a message with the key."""

import pytest

from prl.config.errors import ConfigError
from prl.rollouts.renderer import make_renderer


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
    ],
)
def test_what_does_not_exist_is_refused_by_its_key(tokenizer, name, args, key):
    with pytest.raises(ConfigError) as caught:
        make_renderer(tokenizer, name, args)
    assert str(caught.value).startswith(key)


def test_a_renderer_that_does_not_fit_the_tokenizer_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="renderer.name=llama-3 does not fit this model's tokenizer"):
        make_renderer(tokenizer, "llama-3", {})
