"""Several adapters beside the frozen weights of one model, of which one at a time is used (peft)."""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer


def insert(model: PreTrainedModel, name: str, config: Any, seed: int | None = None) -> None:
    """Give layers of a model another adapter, a `peft.LoraConfig`, which changes nothing yet; with a seed its own."""
    import peft

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        if seed is not None:
            torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, name)


def use(model: PreTrainedModel, name: str | None) -> None:
    """Have a model run with one of its adapters, whose matrices alone get a gradient; None = without any."""
    for layer in _layers(model):
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name)


def remove(model: Any, name: str) -> None:
    """Take an adapter out of a model."""
    for layer in _layers(model):
        layer.delete_adapter(name)
    del model.peft_config[name]


def _layers(model: PreTrainedModel) -> "Iterator[BaseTunerLayer]":
    from peft.tuners.tuners_utils import BaseTunerLayer

    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))
