"""Several adapters beside the frozen weights of one model, of which one at a time is used (peft)."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from prl.trainer.sharding import is_part

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer


def insert(model: PreTrainedModel, name: str, config: Any, seed: int = 0) -> None:
    """Give layers of a model another adapter, a `peft.LoraConfig`, which changes nothing yet."""
    import peft

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        torch.manual_seed(seed)
        with _whole_shapes(model):
            peft.inject_adapter_in_model(config, model, name)


@contextlib.contextmanager
def _whole_shapes(model: PreTrainedModel) -> Iterator[None]:
    """Have layers that are spread over ranks show the shapes of their whole weights, in the block.

    peft 0.21 takes every layer of `DTensor`s for one of tensor parallelism, and makes adapters as small as a rank's
    part; it would have to look at how a tensor is placed.
    """
    weights = ((layer, dict(layer.named_parameters(recurse=False)).get("weight")) for layer in model.modules())
    parts = [(layer, weight) for layer, weight in weights if weight is not None and is_part(weight)]
    for layer, part in parts:
        # One number in the place of all: such a tensor takes no memory.
        layer.weight = torch.nn.Parameter(part.to_local().new_zeros(1).expand(part.shape), requires_grad=False)
    try:
        yield
    finally:
        for layer, part in parts:
            layer.weight = part


def use(model: PreTrainedModel, name: str | None) -> None:
    """Have a model run with one of its adapters, whose matrices alone get a gradient; None = without any."""
    for layer in _layers(model):
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name)


def remove(model: Any, name: str) -> None:
    """Take an adapter out of a model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Adapter .* was active")  # `use` says which is
        for layer in _layers(model):
            layer.delete_adapter(name)
    del model.peft_config[name]


def _layers(model: PreTrainedModel) -> "Iterator[BaseTunerLayer]":
    from peft.tuners.tuners_utils import BaseTunerLayer

    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))
