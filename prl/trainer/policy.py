"""The policy as engines load it."""

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from prl.config.tensor_names import as_in_files, stays_float32
from prl.trainer import lora
from prl.trainer.model import save_weights
from prl.trainer.weights import whole_tensors


class PolicyTensors:
    """The trainer's model under the names of its files, in the engines' number format, adapters merged.

    Args:
        model: the trainer's, of which this rank may have a part.
        dtype: the engines' number format.
        adapters_alone: whether folders may have adapters alone, which engines add to the base model.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, *, adapters_alone: bool = False):
        self.model = model
        self.dtype = dtype
        self.adapters_alone = adapters_alone and lora.has_adapters(model) and lora.adapters_alone(model)

    @functools.cached_property
    def described(self) -> list[tuple[str, torch.dtype, list[int]]]:
        """The name, number format and shape of each tensor."""
        found = []
        for name, tensor in lora.weights_of(self.model):
            dtype = torch.float32 if stays_float32(self.model, name) else self.dtype
            empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
            for own, part in as_in_files(self.model, name, empty).items():
                found.append((own, part.dtype, list(part.shape)))
        return found

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather one tensor after the other, with its name. A collective."""
        return whole_tensors(self.model, self.dtype)

    def write(self, folder: Path | None) -> None:
        """Write the folder of a model, or of adapters; with None, send this rank's parts to the one that writes."""
        if self.adapters_alone:
            lora.save_adapters(self.model, folder)
        else:
            save_weights(self.model, folder, self.dtype)
