"""vLLM's worker with routes for new policy weights. Written for vLLM 0.31.0, which is imported inside the functions."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prl.engines.vllm.weights import folder_of, policy_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.v1.worker.gpu_worker import Worker

VERSION = "0.31.0"

COPIED = ("GptOssForCausalLM",)
"""Models that copy experts into place; those of others go through loaders that vLLM's reload alone makes ready."""
Packed = list[tuple[Any, dict[str, "torch.Tensor"]]]
"""Layers that a CPU engine packs, each with what it packs away, as it was made: without numbers."""


class PolicyWorker:
    """Worker extension, mixed into vLLM's worker: loads new policy weights into the running engine."""

    halfway = False
    """Whether a load has begun and not ended: another would take what that one has left for its own."""

    def load_policy(self, path: str) -> None:
        """Load the weights at `path`, of a model or of an adapter of the one that the server began with.

        In place, where that can be, which takes half as long as vLLM's reload.

        Weights are neither the old nor the new ones if it raises; it does for a weight that the model does not take.
        """
        from vllm.config import set_current_vllm_config
        from vllm.platforms import current_platform

        if self.halfway:
            raise RuntimeError("an earlier load failed half-way: start the engine again")
        worker = cast("Worker", self)
        model: Any = worker.model_runner.get_model()
        tensors = policy_tensors(path, self.base)
        self.halfway = True
        for layer in filter(are_experts, model.modules()):
            if current_platform.is_cpu():
                layer.quant_method.moe_kernel = None  # else vLLM takes what has been loaded for packed
        if self.packed_layers is not None:
            with set_current_vllm_config(worker.vllm_config):
                load_in_place(model, self.packed_layers, tensors)
        else:
            unchecked = any(map(are_experts, model.modules())) and type(model).__name__ not in COPIED
            checked = not unchecked and worker.vllm_config.lora_config is None
            with all_taken(model) if checked else contextlib.nullcontext():
                worker.reload_weights(weights_iterator=tensors)
            if current_platform.is_cpu():
                pack_output_heads(model)
                renew_sinks(model)
        self.halfway = False

    @functools.cached_property
    def base(self) -> Path:
        """The folder of the model that the server began with, as it was found for the first load."""
        return folder_of(cast("Worker", self).vllm_config.model_config.model)

    @functools.cached_property
    def packed_layers(self) -> Packed | None:
        """Return what `layers_to_pack` says of the model; None where vLLM's reload loads weights."""
        from vllm.platforms import current_platform

        worker = cast("Worker", self)
        if not current_platform.is_cpu() or worker.vllm_config.lora_config is not None:
            return None
        return layers_to_pack(worker.model_runner.get_model())


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


def load_in_place(model: Any, packed: Packed, tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
    """Load weights where the model has them, and pack what is packed."""
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    for layer, away in packed:
        for name, as_made in away.items():
            layer._parameters[name] = restore_layer_refs(materialize_meta_tensor(as_made), layer)
    names = {name for name, _ in model.named_parameters()}
    refuse_untaken(names - (model.load_weights(tensors) or names))
    for layer, _ in packed:
        layer.quant_method.process_weights_after_loading(layer)
    renew_sinks(model)


@contextlib.contextmanager
def all_taken(model: Any) -> Iterator[None]:
    """Have vLLM's reload in the block raise, where it only warns, for weights that the model does not take.

    A model may have copied one into place without its loader: then it is lost, for there is no place during a reload.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    load, names = model.load_weights, {name for name, _ in model.named_parameters()}

    def load_all(weights: Any) -> Any:
        taken = load(weights)
        if taken is not None:
            infos = {name: get_layerwise_info(model.get_submodule(name.rpartition(".")[0])) for name in names & taken}
            lost = {name for name, info in infos.items() if info.can_load() and not info.load_numel}
            refuse_untaken(names - taken | lost)
        return taken

    model.load_weights = load_all
    try:
        yield
    finally:
        del model.load_weights


def refuse_untaken(names: set[str]) -> None:
    """Raise RuntimeError if there are any."""
    if names:
        raise RuntimeError(f"the model does not take new weights for {', '.join(sorted(names))}")


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
