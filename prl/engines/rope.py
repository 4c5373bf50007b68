"""Frequencies of positions (rope) that transformers chooses by the longest sequence of a forward.

With them the logprobs of a sequence depend on what is computed beside it. The servers choose them once, by
`max_model_len`; so do the trainer and the engine in the process.
"""

import math
from typing import Any

SCALES = {"attention_factor", "short_mscale", "long_mscale"}
"""Settings of longrope that the servers and transformers read differently, as they do a `factor`."""


def check_rope(config: Any, longest: int, path: str) -> None:
    """Raise ValueError where frequencies would follow the length of sequences of up to `longest` tokens.

    Those of `longrope` may, where `fix_rope` fixes them.

    Args:
        config: the model's config, as transformers has it.
        longest: `model.max_model_len`.
        path: where it lies, for messages.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]  # by kind of layer
    for part in nested or [rope]:
        kind, limit = part.get("rope_type", part.get("type")) or "default", math.inf
        if "dynamic" in kind:
            limit = text.max_position_embeddings
        elif kind in ("longrope", "su"):
            limit = part.get("original_max_position_embeddings") or text.original_max_position_embeddings
        fixed = kind == "longrope" and not nested and SCALES.isdisjoint(part)
        if longest > limit and not (fixed and part.get("factor") in (None, text.max_position_embeddings / limit)):
            raise ValueError(
                f"{path}: its config has rope_type={kind}, whose frequencies above {limit} tokens follow the longest "
                f"sequence of a batch: set model.max_model_len={limit} or less"
            )


def fix_rope(model: Any, longest: int) -> None:
    """Give a model of transformers one set of frequencies: `longrope` those of sequences of up to `longest` tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # a config is checked without torch

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope":
            choose = ROPE_INIT_FUNCTIONS["longrope"]
            frequencies, _ = choose(module.config, module.inv_freq.device, seq_len=longest)
            module.register_buffer("inv_freq", frequencies, persistent=False)
        if kind in ("dynamic", "longrope"):
            module.rope_type = "default"  # with which its forward leaves them alone
