"""Loading new policy weights into a running engine. Written for vLLM 0.31.0, which is imported inside the functions."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig

VERSION = "0.31.0"

COPIED = ("GptOssForCausalLM",)
"""Models that copy experts into place; those of others go through loaders that vLLM's reload alone makes ready."""
Packed = list[tuple[Any, dict[str, "torch.Tensor"]]]
"""Layers that a CPU engine packs, each with what it packs away, as it was made: without numbers."""


class Update:
    """New weights for the model of an engine: `start`, then `load`, then `finish`.

    In place, where that can be, which takes half as long as vLLM's reload. Weights are neither the old nor the new ones
    where one of the three raises; `load` does for a weight that the model does not take.

    Args:
        model: the engine's.
        config: vLLM's config of it.
        packed: of `layers_to_pack`; None = vLLM's reload loads the weights.
        checked: whether vLLM's reload can tell which weights the model has taken.
    """

    def __init__(self, model: Any, config: "ModelConfig", packed: Packed | None, *, checked: bool):
        self.model = model
        self.config = config
        self.packed = packed
        self.checked = checked

    def start(self) -> None:
        """Make the model ready to take weights as they are in files."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
        from vllm.platforms import current_platform

        for layer in filter(are_experts, self.model.modules()):
            if current_platform.is_cpu():
                layer.quant_method.moe_kernel = None  # else vLLM takes what has been loaded for packed
        for layer, away in self.packed or ():
            for name, as_made in away.items():
                layer._parameters[name] = restore_layer_refs(materialize_meta_tensor(as_made), layer)
        # Before vLLM's reload, which takes a tied head apart from the embedding.
        self.names = {name for name, _ in self.model.named_parameters()}
        if self.packed is None:
            initialize_layerwise_reload(self.model)

    def load(self, tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Load all weights, by their names in files."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        taken = self.model.load_weights(tensors)
        if taken is None or not (self.checked or self.packed is not None):
            return
        missed = self.names - taken
        if self.packed is None:
            # vLLM's reload only warns. A weight that a model has copied into place without its loader is lost: there is
            # no place for it during a reload.
            for name in self.names & taken:
                info = get_layerwise_info(self.model.get_submodule(name.rpartition(".")[0]))
                if info.can_load() and not info.load_numel:
                    missed.add(name)
        if missed:
            raise RuntimeError(f"the model does not take new weights for {', '.join(sorted(missed))}")

    def finish(self) -> None:
        """Make of the weights what the engine computes with."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.platforms import current_platform

        if self.packed is None:
            finalize_layerwise_reload(self.model, self.config)
            if current_platform.is_cpu():
                pack_output_heads(self.model)
        for layer, _ in self.packed or ():
            layer.quant_method.process_weights_after_loading(layer)
        if current_platform.is_cpu():
            renew_sinks(self.model)


def layers_to_pack(model: "nn.Module") -> Packed | None:
    """The layers whose weights vLLM packs on a CPU once they are loaded: linear layers, heads and experts.

    None where a layer does anything else with weights: it quantises them, or keeps them in another shape or format.
    """
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    packed: Packed = []
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        experts, packs = are_experts(layer), hasattr(layer, "cpu_linear")
        if experts and type(model).__name__ not in COPIED:
            return None
        linear = type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        if not experts and method is not None and not (linear and packs):
            return None
        if is_deferred_attention_layer(layer) and type(layer) is not Attention:
            return None
        as_made = get_layerwise_info(layer).restore_metadata[0]  # without biases
        away = {
            name
            for name in as_made
            if experts or (name == "weight" and packs and not cast("Any", layer).weight.numel())
        }
        if experts or packs:  # copies: a reload changes the originals' loaders
            packed.append((layer, {name: to_meta_tensor(as_made[name]) for name in away}))
        for name in as_made.keys() - away:
            made, now = as_made[name], layer._parameters.get(name)
            if now is None or (now.shape, now.stride(), now.dtype) != (made.shape, made.stride(), made.dtype):
                return None
    return packed


def are_experts(layer: "nn.Module") -> bool:
    """Return whether a layer is the experts of one, not quantised."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    return type(getattr(layer, "quant_method", None)) is UnquantizedFusedMoEMethod


def pack_output_heads(model: "nn.Module") -> None:
    """Pack output heads again, which vLLM's reload leaves out where a head is tied to the embedding."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def renew_sinks(model: "nn.Module") -> None:
    """Drop the copies of attention sinks, made at first use, in float32 of float16."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    for layer in model.modules():
        impl = getattr(getattr(layer, "attn", None), "impl", None)
        if isinstance(impl, CPUAttentionBackendImpl) and impl.sinks is not None and hasattr(layer, "sinks"):
            impl.sinks = cast("Any", layer).sinks
