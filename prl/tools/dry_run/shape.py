"""What the arithmetic of a dry run needs to know of a model, without its weights.

The model of a `config.json` is built on torch's meta device, which takes no memory, so that its parameters are counted
and not computed.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

from prl.config.build import plain
from prl.config.machine import parameters_of
from prl.config.schema import ModelConfig, PolicyModelConfig
from prl.errors import ConfigError
from prl.monitors.text import in_one_line
from prl.trainer.architecture import has_sinks


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a causal language model."""

    parameters: int
    """All of them; those of a tied head once."""
    outside: int
    """Of them in no layer."""
    layers: int
    layer: int
    """Parameters of one layer, the largest."""
    vocabulary: int
    """Rows of the head."""
    hidden: int
    """Width of what passes from layer to layer."""
    intermediate: int
    """Width inside the MLP; of experts, those that a token is given to, and what all share."""
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = True
    """Whether the output head is the token embedding."""
    qk_norm: bool = False
    """Whether queries and keys have norms of their own."""
    routed: int = 0
    """Experts that a token is given to; 0 = it has none."""
    adapters: int = 0
    """Parameters of adapters (LoRA), which are trained in place of the others; 0 = it has none."""

    @property
    def trained(self) -> int:
        """Parameters that have a gradient."""
        return self.adapters or self.parameters

    @property
    def queries(self) -> int:
        """Floats of a token's queries in a layer."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Floats of a token's keys in a layer; its values have as many."""
        return self.kv_heads * self.head_dim


def shape_of(model: ModelConfig, key: str, *, trained: bool) -> tuple[ModelShape, Any]:
    """The sizes of a model, and the model itself without values; None in place of it where only an engine knows it.

    Args:
        model: its node.
        key: of its path, for messages.
        trained: whether the trainer is to load it.

    Raises ConfigError for a config that transformers cannot build a model of.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    built = build(config, f"{key}={model.path!r}", trained=trained)
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    sizes: dict[str, Any] = {
        "layers": int(text.num_hidden_layers),
        "vocabulary": int(text.vocab_size),
        "hidden": int(text.hidden_size),
        "intermediate": int(setting(text, "intermediate_size") or 4 * text.hidden_size),
        "heads": heads,
        "kv_heads": int(setting(text, "num_key_value_heads") or heads),
        "head_dim": int(setting(text, "head_dim") or text.hidden_size // heads),
    }
    if built is None:
        parameters = parameters_of(model) or 0
        return ModelShape(**sizes, parameters=parameters, outside=parameters, layer=0), None
    return ModelShape(**sizes | parameters_by_place(built) | sizes_of_experts(built, text)), built


def build(config: Any, where: str, *, trained: bool) -> Any:
    """The model of a config, without values; None where only an engine may know it. Raises ConfigError."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if not trained:
            return None
        raise ConfigError(f"{where}: {config.model_type} is no causal language model of transformers: give one of text")
    # The trainer's where it is transformers' own; one that every architecture has.
    attention = "sdpa" if trained and not has_sinks(config) else "eager"
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # transformers has no common class of errors
        raise ConfigError(f"{where}: no model can be built of its config.json ({in_one_line(error)})") from error


def setting(config: Any, name: str) -> Any:
    """A setting of a config, the largest where layers differ in it (Gemma 4); None where it has none of that name."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return max(getattr(layer, name) for layer in config.per_layer_config)
    return getattr(config, name, None)


def parameters_by_place(built: Any) -> dict[str, Any]:
    """How the parameters of a model are spread over it."""
    from prl.trainer.sharding import layers_of

    layers = layers_of(built)
    sizes = [parameters_in(layer) for layer in layers]
    parameters = parameters_in(built)
    return {
        "parameters": parameters,
        "outside": parameters - sum(sizes),
        "layer": max(sizes, default=0),
        "tied": built.get_output_embeddings().weight is built.get_input_embeddings().weight,
        "qk_norm": any(name.endswith("q_norm") for layer in layers for name, _ in layer.named_modules()),
    }


def parameters_in(module: Any) -> int:
    """The number of a module's parameters, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def sizes_of_experts(built: Any, config: Any) -> dict[str, int]:
    """What a mixture of experts has otherwise than its config's `intermediate_size` says; empty for another model."""
    stacked = (each for name, each in built.named_parameters() if each.dim() == 3 and "down_proj" in name)
    down = next(stacked, None)
    routed = int(getattr(config, "num_experts_per_tok", None) or 0)
    if down is None or not routed:
        return {}
    width = down.shape[2] if down.shape[1] == config.hidden_size else down.shape[1]
    own_width = getattr(config, "shared_expert_intermediate_size", None)
    shared = own_width or width * (getattr(config, "n_shared_experts", None) or 0)
    return {"routed": routed, "intermediate": routed * width + shared}


def with_adapters(shape: ModelShape, built: Any, model: PolicyModelConfig) -> ModelShape:
    """The shape of a model once it has the adapters of `model.lora`, which `built` gets. Raises ConfigError."""
    from prl.trainer.lora import adapters_of, add_adapters

    add_adapters(built, plain(model.lora), model.path)
    return replace(shape, adapters=sum(matrix.numel() for matrix in adapters_of(built).values()))


def optimiser_bytes(model: Any, node: Any) -> int:
    """What the optimisers of `trainer.optim` keep of a whole model, by one step of them on the meta device.

    Raises ConfigError as `make_optimizers`, and for an optimiser that cannot step there.
    """
    import torch

    from prl.trainer.optim import make_optimizers

    optimizer = make_optimizers(model, node)
    for group in optimizer.param_groups:
        if group.get("fused"):  # of one kernel or of many, it keeps the same; there is none for these tensors
            group["fused"] = False
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except Exception as error:
        name = plain(node)["_target_"]
        raise ConfigError(f"trainer.optim._target_={name}: no step without values: {in_one_line(error)}") from error
    optimizer.zero_grad()
    return sum(getattr(value, "nbytes", 0) for state in optimizer.state.values() for value in state.values())
