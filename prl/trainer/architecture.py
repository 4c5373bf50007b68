"""Which models the trainer can train and vLLM serves, by their configs.

No torch here: a run asks before it starts processes.
"""

from importlib.util import find_spec
from typing import Any

VLLM = "vLLM 0.31.0"
"""Whose code for models `check_served` is written for."""

ROPE = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}
ROPE |= {"beta_fast", "beta_slow", "truncate"}
"""What it reads of a gpt_oss's rope; `type` is an older name of the first."""
LAYERS = {"full_attention", "sliding_attention", "moe"}
"""Kinds of layers, in transformers' words, that can attend over the sequences of a row and a prompt that they share."""
READ: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {"head_dim": None},
    "glm4_moe_lite": {"first_k_dense_replace": None},
    "hy_v3": {"expert_hidden_dim": None},
    "minimax_m2": {"rotary_dim": None, "scoring_func": "sigmoid", "use_routing_bias": True},
}
"""By model_type, what vLLM reads of a config.json that transformers does not write, and what transformers' model has
there; None = any. Published models have these keys."""
UNROUTED_ON_A_CPU = ("laguna", "minimax_m2")
"""Mixtures of experts that it fails to route there, at the first request: by a sigmoid, without groups."""


def check_architecture(config: Any, path: str) -> None:
    """Raise ValueError for a model that the trainer, or an update of the engine's weights, would get wrong.

    Args:
        config: the model's config, as transformers has it.
        path: where it lies, for messages.
    """
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


def check_served(config: Any, path: str, device: str | None = None) -> None:
    """Raise ValueError for a model that vLLM would run as another one, without a word, or would die of.

    Arguments as of `check_architecture`; `device` is where the run's own engine computes, None = it has none.
    """
    kind = str(getattr(config, "model_type", None))
    is_latent = getattr(config.get_text_config(), "kv_lora_rank", None) is not None
    if device == "cpu" and (is_latent or kind in UNROUTED_ON_A_CPU):
        part = "latent attention (kv_lora_rank)" if is_latent else "experts chosen by a sigmoid without groups"
        raise ValueError(f"{path}: {part}, as a {kind} has, {VLLM} gets wrong on a CPU: use a GPU, or another model")
    if device and config.get_text_config() is not config and find_spec("torchvision") is None:
        raise ValueError(f"{path}: {VLLM} serves a {kind} with torchvision, which is not installed: give a text model")
    for name, value in READ.get(kind, {}).items():
        configured = getattr(config, name, None)
        if configured is None or value not in (None, configured):
            wanted = "as the model has it" if value is None else str(value)
            raise ValueError(
                f"{path}: its config.json has {name}={configured}, and {VLLM} reads it: it should be {wanted}"
            )
    if kind in ("gpt_oss", "glm4_moe") and config.tie_word_embeddings:
        raise ValueError(
            f"{path}: its head is tied to its embedding (tie_word_embeddings), which {VLLM} does not know of in "
            f"{kind}: it would sample with a head of random numbers. Save the model with a head of its own"
        )
    if kind != "gpt_oss":
        return
    layers = ["full_attention" if number % 2 else "sliding_attention" for number in range(config.num_hidden_layers)]
    rope = {name: value for name, value in (config.rope_parameters or {}).items() if value is not None}
    required = {name: getattr(config, name) for name in ("rms_norm_eps", "attention_bias", "layer_types")}
    fixed = {"rms_norm_eps": 1e-5, "attention_bias": True, "layer_types": layers, "rope_type": "yarn"}
    for name, value in (required | {"rope_type": rope.get("rope_type")}).items():
        if value != fixed[name]:
            raise ValueError(
                f"{path}: its config sets {name}={value}; {VLLM} runs every gpt_oss with {fixed[name]}, so that it "
                "would sample from another model"
            )
    if unread := sorted(rope.keys() - ROPE):
        raise ValueError(
            f"{path}: its config sets rope_parameters.{unread[0]}, which {VLLM} does not read of a gpt_oss"
        )


def has_sinks(config: Any) -> bool:
    """Whether the model is gpt-oss, whose attention has sinks, as torch's has not. No other with sinks is trained."""
    return getattr(config, "model_type", None) == "gpt_oss"
