"""The memory of a trainer rank, as plain arithmetic over a model's sizes.

Activations are an estimate: within a quarter of what autograd keeps of a pass of Llama, Qwen3 and Qwen3-MoE. Others
count as the nearest of these.
"""

import math
from dataclasses import dataclass

from prl.config.model_shape import ModelShape, VisionShape

FLOAT = 4
"""Bytes of a weight in the trainer, of its gradient, and of a logit."""
QUERIES = 128
"""Queries of a block of attention on a CPU."""
ADAM = 2 * FLOAT
"""Bytes that Adam keeps of a parameter; other optimisers keep less."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The sizes of a forward pass of a rank and its backward."""

    tokens: int
    length: int
    """Tokens of each sequence in it; they share nothing."""
    size: int = FLOAT
    """Bytes of a number in the pass, over float32 weights."""
    checkpointing: str = "none"
    """Part that backward computes again (`trainer.gradient_checkpointing`): none, selective or full."""
    head_chunk: int | None = None
    cuda: bool = False
    spread: bool = False
    """Each parameter is whole only while it is used (FSDP2): with several ranks, offloaded, on a GPU."""


def activations(shape: ModelShape, how: Pass) -> float:
    """Bytes that autograd keeps of a forward pass until its backward, and of a layer that is computed again.

    In a layer, of each token: gate, activation, up and product of the MLP, inputs of norms and projections, queries
    and what attention makes of them, keys and values. On a CPU each block of queries has the keys before it again.
    All tokens may be placeholders of pictures, which go through the vision tower, too.
    """
    blocks = 1 if how.cuda else math.ceil(how.length / QUERIES)
    gathered = 1.0 if blocks == 1 else (blocks + 1) * 2 / 3
    products = 2 * shape.intermediate + max(1, shape.routed) * shape.hidden + shape.queries + 2 * shape.keys
    inputs = 2 * shape.intermediate + (5 + shape.routed) * shape.hidden + shape.queries
    attention = shape.queries + 2 * gathered * shape.keys
    whole = products + inputs + attention
    multiplied = products * (2 if shape.adapters else 1) + shape.queries + 2 * shape.hidden
    kept = {"none": whole, "selective": multiplied, "full": shape.hidden}
    again = 0.0 if how.checkpointing == "none" else whole
    mask = 0.0 if how.cuda else gathered * min(QUERIES, how.length)
    seen = 0.0 if shape.vision is None else shape.vision.patches * floats_of_patch(shape.vision, how.checkpointing)
    return how.tokens * how.size * (shape.layers * kept[how.checkpointing] + again + mask + seen)


def floats_of_patch(vision: VisionShape, checkpointing: str) -> float:
    """Return the numbers that autograd keeps of a patch: its pixels, and those of each layer of the vision tower."""
    products = 5 * vision.hidden + vision.intermediate
    whole = products + 8 * vision.hidden + vision.intermediate
    kept = {"none": whole, "selective": products + 2 * vision.hidden, "full": vision.hidden}
    again = 0.0 if checkpointing == "none" else whole
    return vision.pixels + vision.layers * kept[checkpointing] + again


def trainer_memory(shape: ModelShape, how: Pass, *, references: int = 0, shards: int = 1) -> dict[str, float]:
    """Return what a rank holds at the peak of a step, bytes by part.

    Args:
        shape: of the model.
        how: it runs a pass.
        references: copies of the model that it holds as references (`algo.kl`).
        shards: ranks that have weights, gradients, optimiser and reference between them.

    Returns:
        weights, gradients, optimiser, reference; `gathered`: weights of other ranks, or in another format, that a pass
        has beside; activations; `head`: logits of a chunk and their gradient, and on a GPU the chunk's product.
    """
    from prl.trainer.logprobs import usual_chunk

    whole = shape.parameters * FLOAT
    chunk = how.head_chunk or usual_chunk(shape.vocabulary, shape.hidden, cuda=how.cuda)
    product = shape.hidden if how.cuda and not shape.adapters else 0  # before it is added to the head's gradient
    return {
        "weights": (whole + shape.adapters * FLOAT) / shards,
        "gradients": shape.trained * FLOAT / shards,
        "optimiser": shape.trained * ADAM / shards,
        "reference": references * whole / shards,
        "gathered": how.size * (shape.outside + 3 * shape.layer) if how.spread else 0,  # two layers, a gradient
        "activations": activations(shape, how),
        "head": (2 * min(how.tokens, chunk) + product) * shape.vocabulary * FLOAT,
    }
