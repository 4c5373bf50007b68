"""A second set of weights for a model of vLLM's, which is loaded while the first one runs.

Written for the version of vLLM in `_vllm_internals.py`, and like there vLLM is imported inside the functions.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

Packed = list[tuple[Any, "torch.Tensor"]]
"""Layers, each with its weight as it was made, without numbers, before any had been loaded."""


def twin_of(model: Any, packed: Packed) -> tuple[Any, list[Any]]:
    """A model like this one with parameters of its own, without numbers, and those of its layers that pack theirs.

    Everything else is shared, what has been packed too: a twin is there to be loaded, not to run.

    Args:
        model: vLLM's.
        packed: Its `layers_to_pack`.
    """
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    as_made = dict(packed)
    modules, parameters = dict[Any, Any]({None: None}), dict[Any, Any]({None: None})

    def parameter_of(layer: Any, name: str, parameter: Any) -> Any:
        if parameter not in parameters:
            away = layer in as_made and name == "weight" and not parameter.numel()
            made = materialize_meta_tensor(as_made[layer] if away else to_meta_tensor(parameter))
            parameters[parameter] = restore_layer_refs(made, layer)
        return parameters[parameter]

    def copied(module: Any) -> Any:
        if module not in modules:
            twin = modules[module] = object.__new__(type(module))
            own = {name: parameter_of(module, name, parameter) for name, parameter in module._parameters.items()}
            children = {name: copied(child) for name, child in module._modules.items()}
            twin.__dict__ = module.__dict__ | {"_parameters": own, "_modules": children}
        return modules[module]

    return copied(model), [modules[layer] for layer in as_made]


def take_over(model: "nn.Module", twin: "nn.Module") -> None:
    """Give a model the numbers of its `twin_of`, and what that has packed."""
    for layer, loaded in zip(model.modules(), twin.modules(), strict=True):
        for name, parameter in layer._parameters.items():
            if (new := loaded._parameters[name]) is not None and parameter is not None:
                parameter.data.copy_(new.data)
        if "cpu_linear" in layer.__dict__:
            layer.cpu_linear = loaded.cpu_linear
