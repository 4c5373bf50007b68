"""How many bytes a trainer rank and an engine hold, as pure arithmetic over a model's sizes.

What autograd keeps of a forward pass was counted with its own hooks for Llama, Qwen3 and Qwen3-MoE (tests/dry_run has
the counts, experiments/benchmarks/memory.md what a step's peak is beside them). Others count as the nearest of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from prl.dry_run.shape import ModelShape

Precision = Literal["float32", "bfloat16"]
"""Number format of a forward pass, over float32 weights."""
Recomputed = Literal["none", "selective", "full"]
"""What backward computes again (`trainer.gradient_checkpointing`)."""
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""
MASTER = 4
"""Bytes of a weight in the trainer, and of its gradient."""
HOLES = 0.4
"""What the C library holds beside what is in use, as a share of the activations in its heap: there they lie between
blocks that live longer. Seen with glibc 2.36 with models of 9 to 22 million parameters: 0.3 to 0.6."""


ENOUGH = 1 << 16
"""Tokens whose blocks are laid out one by one; a longer pass has as many more."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """How a rank runs a forward pass and its backward."""

    budget: int
    """Tokens that it may have."""
    length: int
    """Of each sequence in it, tokens; they share nothing."""
    row: int
    """Longest packed row, tokens; for passes without shared prefixes."""
    precision: Precision = "float32"
    checkpointing: Recomputed = "none"
    trees: bool = True
    """Whether it runs over token trees (`trainer.share_prefixes`), else over packed rows."""
    head_chunk: int | None = None
    cuda: bool = False
    spread: bool = False
    """Whether each parameter is whole only while it is used (FSDP2): with several ranks, offloaded, on a GPU."""

    @property
    def sequence(self) -> int:
        """Tokens of a sequence that go through the model: nothing is predicted from the last one."""
        return max(1, self.length - 1) if self.trees else self.row

    @property
    def tokens(self) -> int:
        """Tokens of the pass: of whole sequences or rows, one at least."""
        return max(1, self.budget // self.sequence) * self.sequence


@dataclass(frozen=True)
class Attended:
    """What attention gathers for a pass, in tokens of a layer, padding included."""

    queries: int
    keys: int
    pairs: int
    """Of query and key that masks are for."""


def attended(how: Pass) -> Attended:
    """The queries, keys and masks of a pass over sequences of `length`, as `prl.trainer.blocks` groups them."""
    if how.cuda:  # FlexAttention: nothing is gathered, and there is no mask
        return Attended(how.tokens, how.tokens, 0)
    if not how.trees:
        return Attended(how.tokens, how.tokens, how.tokens * how.row)
    count = how.tokens // how.sequence
    some = min(count, max(1, ENOUGH // how.sequence))
    sizes = blocks_of(how.sequence, some)
    return Attended(*(size * count // some for size in sizes))


@cache
def blocks_of(length: int, count: int) -> tuple[int, int, int]:
    """Queries, keys and pairs of `count` sequences in a row which share nothing."""
    import numpy as np

    from prl.trainer.blocks import ALIGNED, block_ranges, group_sizes

    depths = np.tile(np.arange(length), count)
    parts = block_ranges(depths, range(0, length * count, length))
    sizes = [(stop - start, int(depths[start]) + stop - start) for start, stop in parts]
    queries = keys = pairs = 0
    for group in group_sizes(sizes):
        query = max(sizes[number][0] for number in group)
        key = -(-max(sizes[number][1] for number in group) // ALIGNED) * ALIGNED
        queries, keys = queries + len(group) * query, keys + len(group) * key
        pairs += len(group) * query * key
    return queries, keys, pairs


def layer_blocks(shape: ModelShape, how: Pass) -> list[tuple[float, float]]:
    """What autograd keeps of one layer: blocks, as their number and the bytes of each."""
    tokens, seen, wide = how.tokens, attended(how), how.precision == "float32"
    size = 4 if wide else 2
    heads = shape.keys if how.cuda or how.trees else shape.queries  # transformers repeats them for a mask
    two = 0 if shape.adapters else 2  # what the weights of norms are multiplied with, for their gradients
    counts = {"float32": [(4 + two, 4)], "bfloat16": [(2, 4), (2 + two, 2)]}[how.precision]
    norms = [(count, tokens * shape.hidden * each) for count, each in counts]
    blocks: list[tuple[float, float]] = [
        (4, tokens * shape.intermediate * size),  # gate, its activation, up, their product
        *norms,  # and the inputs of projections
        (1, tokens * shape.queries * size),  # the input of the projection after attention
        (2, seen.queries * shape.queries * size),  # queries, and what attention makes of them
        (2, seen.keys * heads * size),
        (1, seen.queries * shape.heads * 4),  # the logarithm of each softmax's sum
    ]
    if shape.routed:  # what each token's experts take in, and what they make
        blocks.append((2, tokens * shape.routed * shape.hidden * size))
    if shape.inner:
        blocks.append((1, tokens * shape.inner * size))  # between the two matrices of adapters
    if shape.qk_norm:
        for width in (shape.queries, shape.keys):
            blocks += [(1, tokens * width * 4), (two // 2, tokens * width * size)]
    if not how.trees:  # each layer casts the mask
        blocks.append((1, seen.pairs * size))
    return blocks


def kept_blocks(shape: ModelShape, how: Pass) -> list[tuple[float, float]]:
    """Those of one layer that stay until its backward, and its input where others are computed again then."""
    if how.checkpointing == "none":
        return layer_blocks(shape, how)
    tokens, seen, size = how.tokens, attended(how), 4 if how.precision == "float32" else 2
    blocks: list[tuple[float, float]] = [(1, tokens * shape.hidden * (2 if how.precision == "bfloat16" else 4))]
    if how.checkpointing == "full":
        return blocks
    return [  # `prl.trainer.layers.KEPT`: what matrix products and attention make
        *blocks,
        (2, tokens * shape.intermediate * size),
        (1 + max(1, shape.routed), tokens * shape.hidden * size),
        (1, tokens * shape.queries * size),
        (2, tokens * shape.keys * size),
        (1, seen.queries * shape.queries * size),
        (1, seen.queries * shape.heads * 4),
        *([(1, tokens * (shape.inner + shape.outer) * size)] if shape.inner else []),
    ]


def outer_blocks(shape: ModelShape, how: Pass) -> list[tuple[float, float]]:
    """What is kept once: of the last norm, the head's input, rotations, and the layout of attention; as of a layer."""
    tokens, seen, size = how.tokens, attended(how), 2 if how.precision == "bfloat16" else 4
    return [
        (1, tokens * shape.hidden * 4),
        (1 if shape.adapters else 2, tokens * shape.hidden * size),
        (2, tokens * shape.head_dim * size),
        *([(1, seen.pairs * size), (1, (seen.queries + seen.keys) * 8)] if how.trees else [(1, seen.pairs)]),
    ]


def total(blocks: list[tuple[float, float]]) -> float:
    """Bytes of blocks."""
    return sum(count * each for count, each in blocks)


def activations(shape: ModelShape, how: Pass) -> float:
    """What autograd keeps of a forward pass until its backward, bytes, but for copies of weights."""
    return shape.layers * total(kept_blocks(shape, how)) + total(outer_blocks(shape, how))


def trainer_memory(
    shape: ModelShape, how: Pass, *, optimiser: int, reference: bool = False, shards: int = 1
) -> dict[str, float]:
    """What a rank holds at the peak of a step of several passes, bytes by part.

    Args:
        shape: of the model.
        how: it runs a pass.
        optimiser: bytes that the optimiser keeps of all that is trained.
        reference: whether it holds a frozen copy of the model (`algo.kl`).
        shards: ranks that have weights, gradients, optimiser and reference between them.

    Returns:
        weights, gradients, optimiser, reference; `gathered`: weights of other ranks, or in another format, that a pass
        has beside; activations; `head`: logits and the gradient of the head; `heap`: what the C library holds unused.
    """
    from prl.trainer.logprobs import usual_chunk

    whole, adapters = shape.parameters * MASTER, shape.adapters * MASTER
    chunk = min(how.tokens, how.head_chunk or usual_chunk(shape.vocabulary, shape.hidden))
    logits = chunk * shape.vocabulary * 4
    head = 0 if adapters else shape.vocabulary * shape.hidden * 4  # its gradient
    kept, layer = activations(shape, how), layer_blocks(shape, how)
    within = 3 * how.tokens * shape.intermediate * (4 if how.precision == "float32" else 2)
    size = 4 if how.precision == "float32" else 2
    at_head = {"activations": kept, "head": max(2 * logits, logits + head)}
    if how.cuda and size == 2:  # the product of a chunk in float32, before it is added, and a chunk of bfloat16 for it
        at_head["head"] = max(2 * logits, logits + logits / 2 + 2 * head)
    waiting = how.spread or shape.tied  # a tied head's gradient for the embedding's, a spread one's for the last layer
    again = total(layer) if how.checkpointing != "none" else 0
    at_layer = {  # in the backward of the last layer
        "activations": kept - total(outer_blocks(shape, how)) + within + again,
        "head": (head * size / MASTER if how.spread else head) * waiting,
    }
    summed = how.spread and not adapters  # over ranks, in float32
    at_end = {"activations": 0.0, "head": shape.outside * (size + MASTER) * summed}
    peak = max(at_head, at_layer, at_end, key=lambda parts: sum(parts.values()))
    return {
        "weights": (whole + adapters) / shards,
        "gradients": shape.trained * MASTER / shards,
        "optimiser": optimiser / shards,
        "reference": whole / shards if reference else 0,
        "gathered": gathered(shape, how),
        **peak,
        "heap": 0 if how.cuda else heap(shape, how),
    }


def gathered(shape: ModelShape, how: Pass) -> float:
    """Bytes of weights that a pass has beside the rank's own.

    Spread: those outside of the layers, and two layers, the one that runs and the next one's, with the gradient of
    one.
    """
    size = 4 if how.precision == "float32" else 2
    gradient = 0 if shape.adapters else shape.layer
    return size * (shape.outside + 2 * shape.layer + gradient) if how.spread else 0


def heap(shape: ModelShape, how: Pass) -> float:
    """Bytes that the C library of a rank on a CPU holds unused at the peak (`trainer_environment`)."""
    from prl.trainer.config import KEPT, OWN_PAGES

    blocks = shape.layers * kept_blocks(shape, how)
    if how.checkpointing != "none":
        blocks += layer_blocks(shape, how)
    small = sum(count * each for count, each in blocks if each < OWN_PAGES)
    return max(KEPT, HOLES * small)


# --- the engine -------------------------------------------------------------------------------------------------------

BLOCKS = {"cpu": 128, "cuda": 16}
"""Tokens of a block of vLLM's KV cache, unless `block-size` says otherwise."""
GPU_TOKENS = 8192
"""Tokens that vLLM runs at once on a GPU to see what it needs beside the KV cache, by default."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """How an engine serves a model."""

    dtype: str
    device: str
    tensor_parallel: int = 1
    max_num_seqs: int = 256
    updated: bool = False
    """Whether it takes the weights of a policy that is trained."""
    cache: float | None = None
    """Bytes of the KV cache that the config gives; None = what is left of `share`."""
    share: float = 0
    """Bytes that it may take of each GPU."""


def kv_bytes_per_token(shape: ModelShape, dtype: str, tensor_parallel: int = 1) -> int:
    """Bytes of one token in the KV cache of one device."""
    of_layer = shape.latent or 2 * max(1, shape.kv_heads // tensor_parallel) * shape.head_dim
    return shape.layers * of_layer * SIZES[dtype]


def kv_tokens(shape: ModelShape, how: Served, cache: float) -> int:
    """Tokens that a KV cache of `cache` bytes a device holds, in whole blocks."""
    block = BLOCKS[how.device]
    return int(cache // (block * kv_bytes_per_token(shape, how.dtype, how.tensor_parallel))) * block


def engine_memory(shape: ModelShape, how: Served) -> Mapping[str, float]:
    """What an engine holds on each of its devices, bytes by part: weights, `head`, activations, KV cache.

    On a CPU it keeps a second, packed copy of the head, and new weights are loaded and packed beside the old ones, for
    which the C library keeps the memory. A KV cache of less than 0 has no room.
    """
    size = SIZES[how.dtype]
    weights = shape.parameters * size / how.tensor_parallel
    if how.cache is not None:
        head = shape.vocabulary * shape.hidden * size
        return {"weights": weights, "head": head, "update": 2 * weights * how.updated, "KV cache": how.cache}
    # Of the trial with which vLLM sees what is left: an MLP's two wide products, and logits in float32 with a copy.
    wide = GPU_TOKENS * (2 * shape.hidden + 3 * shape.intermediate / how.tensor_parallel) * size
    trial = wide + 2 * how.max_num_seqs * shape.vocabulary * 4
    return {"weights": weights, "activations": trial, "KV cache": how.share - weights - trial}
