"""How many bytes a trainer rank and an engine hold, as plain arithmetic over a model's sizes.

Activations are an estimate: within a quarter of what autograd keeps of a pass of Llama, Qwen3 and Qwen3-MoE. Others
count as the nearest of these.
"""

import math
from dataclasses import dataclass

from prl.config.hardware import GIB
from prl.config.schema import VLLMConfig
from prl.tools.dry_run.shape import ModelShape

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""
FLOAT = 4
"""Bytes of a weight in the trainer, of its gradient, and of a logit."""
QUERIES = 128
"""Of a block of attention on a CPU."""
ADAM = 2 * FLOAT
"""Bytes that Adam keeps of a parameter; other optimisers keep less."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """How a rank runs a forward pass and its backward."""

    tokens: int
    length: int
    """Of each sequence in it, tokens; they share nothing."""
    size: int = FLOAT
    """Bytes of a number in the pass, over float32 weights."""
    checkpointing: str = "none"
    """What backward computes again (`trainer.gradient_checkpointing`): none, selective or full."""
    head_chunk: int | None = None
    cuda: bool = False
    spread: bool = False
    """Whether each parameter is whole only while it is used (FSDP2): with several ranks, offloaded, on a GPU."""


def activations(shape: ModelShape, how: Pass) -> float:
    """Bytes that autograd keeps of a forward pass until its backward, and of a layer that is computed again.

    In a layer, of each token: gate, activation, up and product of the MLP, inputs of norms and projections, queries
    and what attention makes of them, keys and values. On a CPU each block of queries has the keys before it again.
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
    return how.tokens * how.size * (shape.layers * kept[how.checkpointing] + again + mask)


def trainer_memory(shape: ModelShape, how: Pass, *, references: int = 0, shards: int = 1) -> dict[str, float]:
    """What a rank holds at the peak of a step, bytes by part.

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


# --- the engine -------------------------------------------------------------------------------------------------------

BLOCKS = {"cpu": 128, "cuda": 16}
"""Tokens of a block of vLLM's KV cache, unless `block-size` says otherwise."""
GPU_TOKENS = 8192
"""Tokens that vLLM runs at once on a GPU to see what it needs beside the KV cache, by default."""


def kv_bytes_per_token(shape: ModelShape, dtype: str, tensor_parallel: int = 1) -> int:
    """Bytes of one token in the KV cache of one device."""
    heads = max(1, shape.kv_heads // tensor_parallel)
    return shape.layers * 2 * heads * shape.head_dim * SIZES[dtype]


def kv_tokens(shape: ModelShape, dtype: str, device: str, cache_bytes: float, tensor_parallel: int = 1) -> int:
    """Tokens that a KV cache of so many bytes a device holds, in whole blocks."""
    return int(cache_bytes // (BLOCKS[device] * kv_bytes_per_token(shape, dtype, tensor_parallel))) * BLOCKS[device]


def engine_memory(
    shape: ModelShape, dtype: str, engine: VLLMConfig, *, share: float | None, updated: bool
) -> dict[str, float]:
    """What an engine holds on each of its devices, bytes by part.

    On a CPU it keeps a second, packed copy of the head, and new weights are loaded and packed beside the old ones, for
    which the C library keeps the memory.

    Args:
        shape: of the model.
        dtype: of its weights there.
        engine: the engine's node.
        share: bytes that it may take of each GPU; None = it runs on a CPU.
        updated: whether it takes the weights of a policy that is trained.
    """
    size = SIZES[dtype]
    if share is None:
        packed = shape.parameters * size
        head = shape.vocabulary * shape.hidden * size
        cache_bytes = engine.kv_cache_gb * GIB
        return {"weights": packed, "head": head, "update": 2 * packed * updated, "KV cache": cache_bytes}
    spans = engine.tensor_parallel_size
    weights = shape.parameters * size / spans
    # Of the trial with which vLLM sees what is left: an MLP's two wide products, and logits in float32 with a copy.
    wide = GPU_TOKENS * (2 * shape.hidden + 3 * shape.intermediate / spans) * size
    trial = wide + 2 * engine.max_num_seqs * shape.vocabulary * 4
    return {"weights": weights, "activations": trial, "KV cache": max(0.0, share - weights - trial)}
