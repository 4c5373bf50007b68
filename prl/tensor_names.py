"""What the tensors of a model are called in its files, where transformers has others in memory.

It keeps the experts of a layer in one tensor; the files have one for each expert and matrix. What transformers keeps to
itself of that is used here alone; written for transformers 5.17. It is imported inside the functions.
"""

import re
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch

_KNOWN: "WeakKeyDictionary[Any, dict[str, str | None]]" = WeakKeyDictionary()
"""By model and name in memory, the name of the same tensor in the files; None where it is not the same one."""


def as_in_files(model: Any, name: str, tensor: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """What files have of one whole tensor of a model, by the names that `save_pretrained` writes; views of it.

    Args:
        model: as transformers has loaded or made it; what it is called in its files depends on where it came from.
        name: in memory, without adapters.
        tensor: on any device, meta too.
    """
    from transformers.core_model_loading import revert_weight_conversion

    known = _KNOWN.setdefault(model, {})
    if (same := known.get(name)) is not None:
        return {same: tensor}
    found: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: tensor})
    if name not in known:
        only = next(iter(found.items())) if len(found) == 1 else ("", None)
        known[name] = only[0] if only[1] is tensor else None
    return found


def check_names(model: Any) -> None:
    """Raise ValueError where a tensor of the files is made of several of the model: `as_in_files` has one at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    expected = {name: tensor.shape for name, tensor in revert_weight_conversion(model, dict(state)).items()}
    found = [(part, each.shape) for name in state for part, each in as_in_files(model, name, state[name]).items()]
    if len(found) != len(expected) or dict(found) != expected:
        odd = next((name for name, shape in found if expected.get(name) != shape), next(iter(expected)))
        raise ValueError(
            f"{type(model).__name__}: transformers makes {odd} of its files out of several tensors, which prl, "
            "writing one after the other, cannot"
        )


def stays_float32(model: Any, name: str) -> bool:
    """Whether a tensor is float32 in files of any number format, such as what balances the load of experts."""
    patterns = model._keep_in_fp32_modules_strict or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)
