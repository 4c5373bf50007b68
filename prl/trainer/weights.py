"""The tensors of a model as its files and the engines have them: whole, by the files' names, in their number format."""

from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel

from prl.config.tensor_names import as_in_files, stays_float32
from prl.trainer.lora import NAME, weights_of
from prl.trainer.sharding import whole


def whole_tensors(
    model: PreTrainedModel, dtype: torch.dtype, adapter: str = NAME
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint by name, in `dtype`, where the model is; an adapter is merged, no tied ones.

    One tensor of the model after the other is gathered, of experts those of a layer: of a model that is spread over
    ranks, all must go through them.
    """
    for name, tensor in weights_of(model, adapter):
        tensor = whole(tensor.to(torch.float32 if stays_float32(model, name) else dtype))
        yield from as_in_files(model, name, tensor).items()


def on_writer(
    tensors: Iterable[tuple[str, torch.Tensor]], *, writes: bool, copies: bool = False
) -> dict[str, torch.Tensor]:
    """Go through tensors whose making is a collective. The rank that writes them gets them all, in host memory.

    With `copies` they stay as they are while the trainer goes on.
    """
    kept = {}
    for name, tensor in tensors:
        # The others take part in the gathering, and keep nothing: one copy in host memory, not one a rank.
        if writes:
            kept[name] = tensor.detach().to("cpu", copy=copies).contiguous()
    return kept
