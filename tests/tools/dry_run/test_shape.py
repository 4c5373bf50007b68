"""Models as their configs have them, without values."""

import pytest
import transformers

from prl.base.errors import ConfigError
from prl.tools.dry_run.shape import build, setting


def test_largest_head_stands_for_all_layers():
    """Gemma 4: 256 within a window and 512 without."""
    config = transformers.AutoConfig.for_model("gemma4_text")
    assert (setting(config, "head_dim"), setting(config, "hidden_size")) == (512, config.hidden_size)


def test_a_model_of_images_is_not_trained():
    with pytest.raises(ConfigError, match=r"^m: qwen3_vl is no causal language model of transformers"):
        build(transformers.AutoConfig.for_model("qwen3_vl"), "m", trained=True)
