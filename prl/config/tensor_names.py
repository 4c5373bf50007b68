"""Names of a model's tensors in its files, where transformers has others in memory.

It keeps the experts of a layer in one tensor; the files have one for each expert and matrix. What transformers keeps to
itself of that is used here alone; written for transformers 5.17. It is imported inside the functions.
"""

import re
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch

_KNOWN: "WeakKeyDictionary[Any, dict[str, str | None]]" = WeakKeyDictionary()
"""Names of tensors in the files, by model and name in memory; None where it is not the same tensor."""


def as_in_files(model: Any, name: str, tensor: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """Return what files have of one whole tensor of a model, by the names that `save_pretrained` writes; views of it.

    Args:
        model: as transformers has loaded or made it; what it is called in its files depends on where it came from.
        name: in memory, without adapters.
        tensor: on any device, meta too.
    """
    from transformers.core_model_loading import revert_weight_conversion

    known = _KNOWN.setdefault(model, {})
    file_name = known.get(name)
    if file_name is not None:
        return {file_name: tensor}
    in_files: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: tensor})
    if name not in known:
        same = [part for part, value in in_files.items() if value is tensor]
        known[name] = same[0] if len(in_files) == len(same) == 1 else None
    return in_files


def check_names(model: Any) -> None:
    """Raise ValueError where a tensor of the files is made of several of the model: `as_in_files` has one at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    expected = {name: tensor.shape for name, tensor in revert_weight_conversion(model, dict(state)).items()}
    shapes: list[tuple[str, torch.Size]] = []
    for name, tensor in state.items():
        shapes += [(part, value.shape) for part, value in as_in_files(model, name, tensor).items()]
    if len(shapes) != len(expected) or dict(shapes) != expected:
        odd = next((name for name, shape in shapes if expected.get(name) != shape), next(iter(expected)))
        raise ValueError(f"{type(model).__name__}: {odd} of its files is made of several tensors: prl cannot write it")


def stays_float32(model: Any, name: str) -> bool:
    """Return whether a tensor is float32 in files of any number format, such as what balances the load of experts."""
    patterns = model._keep_in_fp32_modules_strict or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)
