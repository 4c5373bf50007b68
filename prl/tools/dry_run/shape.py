"""Sizes of a model for the arithmetic of a dry run, without its weights.

The model of a `config.json` is built on torch's meta device, which takes no memory, so that its parameters are counted
and not computed.
"""

import copy
from typing import Any

from prl.base.errors import ConfigError
from prl.base.text import in_one_line
from prl.config.build import plain
from prl.config.hardware import parameters_of
from prl.config.model_shape import ModelShape, VisionShape
from prl.config.schema import ModelConfig, PolicyModelConfig
from prl.trainer.architecture import SEEING, has_sinks, sees


def shape_of(model: ModelConfig, key: str, *, lora: Any = None, trained: bool) -> ModelShape:
    """The sizes of a model.

    Args:
        model: its node.
        key: of its path, for messages.
        lora: the node `model.lora` of a policy; None = it has no adapters.
        trained: whether the trainer is to load it.

    Raises ConfigError for a config that transformers cannot build a model of.
    """
    from transformers import AutoConfig

    from prl.trainer.model import freeze

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    built = build(config, f"{key}={model.path!r}", trained=trained)
    if isinstance(model, PolicyModelConfig):
        freeze(built, model.freeze)
    text = config.get_text_config()
    heads, routed = int(text.num_attention_heads), int(setting(text, "num_experts_per_tok") or 0)
    width = (setting(text, "moe_intermediate_size") if routed else None) or setting(text, "intermediate_size")
    return ModelShape(
        layers=int(text.num_hidden_layers),
        vocabulary=int(text.vocab_size),
        hidden=int(text.hidden_size),
        intermediate=int(width or 4 * text.hidden_size) * max(1, routed),
        heads=heads,
        kv_heads=int(setting(text, "num_key_value_heads") or heads),
        head_dim=int(setting(text, "head_dim") or text.hidden_size // heads),
        routed=routed,
        frozen=sum(weight.numel() for weight in built.parameters() if not weight.requires_grad) if trained else 0,
        **parameters_by_place(built, parameters_of(model) or 0),
        adapters=0 if lora is None or lora.rank is None else parameters_of_adapters(built, lora, model.path),
        vision=vision_of(config, built) if sees(config) and built is not None else None,
    )


def vision_of(config: Any, built: Any) -> VisionShape | None:
    """The sizes of the vision tower of a model; None where none of it is trained."""
    language = "language_model.", "lm_head."
    names = (name for name, weight in built.named_parameters() if weight.requires_grad)
    if all(name.removeprefix(f"{built.base_model_prefix}.").startswith(language) for name in names):
        return None
    vision = config.vision_config
    return VisionShape(
        layers=int(setting(vision, "depth") or vision.num_hidden_layers),
        hidden=int(vision.hidden_size),
        # Of Qwen2.5-VL, gate and activation.
        intermediate=int(vision.intermediate_size) * (2 if config.model_type == "qwen2_5_vl" else 1),
        patches=int(setting(vision, "spatial_merge_size") or 1) ** 2,
        pixels=3 * int(setting(vision, "temporal_patch_size") or 1) * int(vision.patch_size) ** 2,
    )


def build(config: Any, where: str, *, trained: bool) -> Any:
    """The model of a config, without values; None where only an engine may know it. Raises ConfigError."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from prl.trainer.model import class_of

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in SEEING:
        if not trained:
            return None
        raise ConfigError(f"{where}: {config.model_type} is no causal language model of transformers: give one of text")
    # The trainer's where it is transformers' own; one that every architecture has.
    attention = "sdpa" if trained and not has_sinks(config) else "eager"
    try:
        with torch.device("meta"):
            return class_of(config).from_config(
                copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # transformers has no common class of errors
        raise ConfigError(f"{where}: no model can be built of its config.json ({in_one_line(error)})") from error


def setting(config: Any, name: str) -> Any:
    """A setting of a config, the largest where layers differ in it (Gemma 4); None where it has none of that name."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return max(getattr(layer, name) for layer in config.per_layer_config)
    return getattr(config, name, None)


def parameters_by_place(built: Any, in_files: int) -> dict[str, int]:
    """Count the parameters of a model by place; `in_files` is their number where the model was not built."""
    from prl.trainer.sharding import layers_of

    if built is None:
        return {"parameters": in_files, "outside": in_files, "layer": 0}
    sizes = [parameters_in(layer) for layer in layers_of(built)]
    parameters = parameters_in(built)
    return {"parameters": parameters, "outside": parameters - sum(sizes), "layer": max(sizes, default=0)}


def parameters_in(module: Any) -> int:
    """The number of a module's parameters, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def parameters_of_adapters(built: Any, lora: Any, path: str) -> int:
    """Parameters of the adapters that `lora` asks for, which `built` gets. Raises ConfigError."""
    from prl.trainer.lora import adapters_of, add_adapters

    add_adapters(built, plain(lora), path)
    return sum(matrix.numel() for matrix in adapters_of(built).values())
