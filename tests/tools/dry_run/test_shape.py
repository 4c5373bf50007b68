"""Models as their configs have them, without values."""

import math
from types import SimpleNamespace

import pytest
import transformers
from seeing import SEEING, write_model

from prl.base.errors import ConfigError
from prl.config.model_folder import tensors_of
from prl.config.schema import LoraConfig, PolicyModelConfig
from prl.tools.dry_run.memory import Pass, trainer_memory
from prl.tools.dry_run.shape import build, setting, shape_of


def test_largest_head_stands_for_all_layers():
    """Gemma 4: 256 within a window and 512 without."""
    config = transformers.AutoConfig.for_model("gemma4_text")
    assert (setting(config, "head_dim"), setting(config, "hidden_size")) == (512, config.hidden_size)


def test_a_model_of_sounds_is_not_trained():
    with pytest.raises(ConfigError, match=r"^m: whisper_encoder is no causal language model of transformers"):
        build(SimpleNamespace(model_type="whisper_encoder"), "m", trained=True)


@pytest.mark.parametrize("kind", SEEING)
def test_a_vision_tower_is_counted_as_it_is_trained(tmp_path, kind):
    """Frozen, or beside adapters of the language part, it has no gradient and keeps no activations."""
    folder = write_model(tmp_path, kind)
    sizes = dict(tensors_of(folder, "x"))
    tower = {"llava": "vision_tower"}.get(kind, "visual")
    of_tower = sum(math.prod(shape) for name, shape in sizes.items() if tower in name.split("."))

    def shape(lora=None, **options):
        return shape_of(PolicyModelConfig(path=str(folder), **options), "m", lora=lora, trained=True)

    whole, frozen = shape(), shape(freeze=[tower])
    assert whole.parameters == whole.trained == sum(math.prod(shape) for shape in sizes.values())
    assert frozen.frozen == of_tower > 0 and frozen.trained == whole.trained - of_tower
    assert whole.vision.layers == 3 and whole.vision.patches == (1 if kind == "llava" else 4)
    how = Pass(tokens=100, length=100)
    parts = trainer_memory(whole, how), trainer_memory(frozen, how)
    assert parts[0]["gradients"] - parts[1]["gradients"] == 4 * of_tower
    adapters = shape(LoraConfig(rank=2))
    assert adapters.vision is None and adapters.adapters == adapters.trained
    text = trainer_memory(adapters, how)["activations"]
    assert parts[0]["activations"] > text
    if kind != "llava":  # whose projector is none of the tower, and trains
        return
    assert shape(freeze=[tower, "multi_modal_projector"]).vision is None
