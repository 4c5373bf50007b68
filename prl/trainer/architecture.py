"""Checks of the models that the trainer can train, by their configs.

No torch here: a run asks before it starts processes.
"""

from typing import Any

from prl.config.model_folder import sees
from prl.engines.rope import check_rope

LAYERS = {"full_attention", "sliding_attention", "moe"}
"""Kinds of layers, in transformers' words, that can attend over the sequences of a row and a prompt that they share."""
SEEING = ("qwen3_vl", "qwen2_5_vl", "llava")
"""Models that see pictures, in transformers' words, whose positions and pictures the trainer knows."""
TOWERS = ("qwen3_vl_vision", "qwen2_5_vl_vision", "clip_vision_model", "siglip_vision_model")
"""Kinds of their vision towers: others want more of a picture than the placeholders that lie side by side."""


def check_architecture(config: Any, path: str, longest: int = 0) -> None:
    """Raise ValueError for a model that the trainer would get wrong.

    Args:
        config: the model's config, as transformers has it.
        path: where it lies, for messages.
        longest: tokens of the longest sequence; 0 = any length is taken.
    """
    check_rope(config, longest, path)
    if sees(config) and (config.model_type not in SEEING or config.vision_config.model_type not in TOWERS):
        kind = f"{config.model_type} with a vision tower of kind {config.vision_config.model_type}"
        raise ValueError(
            f"{path}: the trainer does not know how {kind} sees pictures: choose Qwen3-VL, Qwen2.5-VL, LLaVA with CLIP "
            "or SigLIP, or a model of text"
        )
    text = config.get_text_config()
    if others := set(getattr(text, "layer_types", None) or ()) - LAYERS:
        raise ValueError(
            f"{path}: its config has layers of kind {min(others)} (layer_types), which mix the sequences that share a "
            "row; the trainer takes full_attention and sliding_attention: choose a model of those alone"
        )
    # Transformed after the head: `stack_logprobs` applies the head itself and would miss that.
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if {getattr(config, name, None), getattr(text, name, None)} - {None, 1}:
            raise ValueError(f"{path}: its config sets {name}, a change to the logits that the trainer does not apply")
    if cap := getattr(text, "attn_logit_softcapping", None):
        raise ValueError(
            f"{path}: its config sets attn_logit_softcapping={cap}, a cap on attention's scores that torch's attention "
            "does not have"
        )
    if packed := getattr(config, "quantization_config", None):
        method = packed.get("quant_method", packed) if isinstance(packed, dict) else packed
        raise ValueError(
            f"{path}: its weights are quantised ({str(method)[:80]}), which the trainer cannot train: give the same "
            "model in bfloat16 or float32, without quantization_config in its config.json"
        )


def language_of(model: Any) -> Any:
    """Return the part of a model that reads tokens: of one without a vision tower, all of it."""
    return model.base_model.language_model if sees(model.config) else model


def has_sinks(config: Any) -> bool:
    """Return whether the model is gpt-oss, the one with sinks in its attention that is trained; torch's has none."""
    return getattr(config, "model_type", None) == "gpt_oss"
