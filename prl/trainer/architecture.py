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
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            raise ValueError(
                f"{path}: a mixture of experts ({name}={getattr(config, name)}); the engine does not take new expert "
                "weights while it runs, so it would go on sampling with old ones"
            )
