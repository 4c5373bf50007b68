"""Which models the trainer can train, by their configs. No torch here: a run asks before it starts processes."""

from typing import Any


def check_architecture(config: Any, path: str) -> None:
    """Raise ValueError for a model that the trainer, or an update of the engine's weights, would get wrong.

    Args:
        config: the model's config, as transformers has it.
        path: where it lies, for messages.
    """
    # Transformed after the head: `stack_logprobs` applies the head itself and would miss that.
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{path}: its config sets {name}, a change to the logits that the trainer does not apply")
    if cap := getattr(config, "attn_logit_softcapping", None):
        raise ValueError(
            f"{path}: its config sets attn_logit_softcapping={cap}, a cap on attention's scores that torch's attention "
            "does not have"
        )
    if getattr(config, "model_type", None) == "gpt_oss":
        raise ValueError(f"{path}: gpt_oss has attention sinks, which torch's attention does not have")
