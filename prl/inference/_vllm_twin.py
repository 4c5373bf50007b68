"""A second set of weights for a model of vLLM's on a CPU, which is made ready while the first one runs.

Written for the version of vLLM in `_vllm_internals.py`, and like there vLLM is imported inside the functions.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

Packed = list[tuple[Any, dict[str, "torch.Tensor"]]]
"""Layers, each with its weights as they were made, without numbers, before any had been loaded."""


class Twin:
    """A model like another one with parameters of its own; everything else is shared. It is loaded, and never runs."""

    def __init__(self, model: Any, packed: Packed):
        """`packed` are the `layers_to_pack` of `model`."""
        self._parameters, self._modules = dict[Any, Any]({None: None}), dict[Any, Any]({None: None})
        self._as_made = dict(packed)
        self.model = self._copied(model)
        forget_packed_experts(self.model)

    def load(self, tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Load tensors in Hugging Face names, and pack them."""
        self.model.load_weights(tensors)
        for layer in self._as_made:
            own = self._modules[layer]
            own.quant_method.process_weights_after_loading(own)

    def take_over(self) -> None:
        """Give the other model the numbers of this one, and what has been packed."""
        for layer, own in self._modules.items():
            if layer is None:
                continue
            if layer in self._as_made and "cpu_linear" in own.__dict__:
                layer.cpu_linear = own.cpu_linear
            for name, parameter in layer._parameters.items():
                if parameter is not None and parameter.numel():  # else it has been packed
                    parameter.data.copy_(own._parameters[name].data)

    def _copied(self, module: Any) -> Any:
        if module not in self._modules:
            twin = object.__new__(type(module))
            self._modules[module] = twin
            own = {name: self._parameter(module, name, parameter) for name, parameter in module._parameters.items()}
            children = {name: self._copied(child) for name, child in module._modules.items()}
            twin.__dict__ = module.__dict__ | {"_parameters": own, "_modules": children}
        return self._modules[module]

    def _parameter(self, layer: Any, name: str, parameter: Any) -> Any:
        from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        if parameter not in self._parameters:
            as_made = self._as_made.get(layer, {}).get(name)
            away = as_made is not None and (are_packed_experts(layer) or not parameter.numel())
            made = materialize_meta_tensor(as_made if away else to_meta_tensor(parameter))
            if not away:  # files need not have all
                made.data.copy_(parameter.data)
            self._parameters[parameter] = restore_layer_refs(made, layer)
        return self._parameters[parameter]


def are_packed_experts(layer: "nn.Module") -> bool:
    """Whether a layer is the experts of one, not quantised, on a CPU."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and type(getattr(layer, "quant_method", None)) is UnquantizedFusedMoEMethod


def forget_packed_experts(model: Any) -> None:
    """Have experts on a CPU packed when weights have been loaded, as they were the first time; until then none can run.

    Where vLLM has a kernel for them already, it leaves what it loads as it is, for a kernel that takes it as packed.
    """
    for layer in filter(are_packed_experts, model.modules()):
        layer.quant_method.moe_kernel = None
