"""Adapters beside the base, of which a pass reads each once for all of its tokens.

vLLM copies an adapter's matrices for each token: hundreds of MB in a pass, for a small model. Where a batch has
adapters, it adds the one in its last place to the tokens of the base (index -1), and ends at logprobs of a prompt. To
be removed once `lora/ops/torch_ops/lora_ops.py` takes the tokens of an adapter together, and none of the base. Written
for the version of vLLM in `worker.py`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def read_each_once() -> None:
    """Patch vLLM in this process and those that it forks."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def shrink(inputs: "Tensor", weights: "Tensor", output: "Tensor", places: "Tensor", scaling: float = 1.0) -> None:
        product = by_adapter(inputs, weights, places, output.dtype)
        output[:, : product.shape[1]] = scaling * product

    def expand_slice(
        inputs: "Tensor",
        weights: "Tensor",
        output: "Tensor",
        places: "Tensor",
        offset: int,
        size: int,
        add_inputs: bool = True,
    ) -> None:
        part = output[:, offset : offset + size]
        product = by_adapter(inputs, weights, places, output.dtype)[:, :size]  # either may have padding behind it
        part = part[:, : product.shape[1]]
        part.copy_(part + product if add_inputs else product)

    def expand(
        inputs: "Tensor", weights: "Tensor", output: "Tensor", places: "Tensor", add_inputs: bool = True
    ) -> None:
        expand_slice(inputs, weights, output, places, 0, output.shape[1], add_inputs)

    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink, module.bgmv_expand, module.bgmv_expand_slice = shrink, expand, expand_slice


def by_adapter(inputs: "Tensor", weights: "Tensor", places: "Tensor", dtype: "torch.dtype") -> "Tensor":
    """Multiply each token with the matrix of its adapter; 0 for those of the base.

    Args:
        inputs: `[tokens, columns]`.
        weights: `[places, 1, rows, columns]`, or without the second dimension.
        places: `[tokens]` The adapter of each token; -1 = the base alone.
        dtype: The number format of the result.

    Returns `[tokens, rows]`.
    """
    result = inputs.new_zeros(len(inputs), weights.shape[-2], dtype=dtype)
    # The output head computes logprobs of a prompt with the places of the whole batch. It has no adapter in prl.
    if len(places) != len(inputs):
        return result
    for place in places.unique().tolist():
        if place >= 0:
            tokens = places == place
            result[tokens] = inputs[tokens].to(dtype) @ weights[place].squeeze(0).to(dtype).T
    return result
