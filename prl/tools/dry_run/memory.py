"""How many bytes a trainer rank and an engine hold, as pure arithmetic over a model's sizes.

What autograd keeps of a forward pass was counted with its own hooks for Llama, Qwen3 and Qwen3-MoE
(tests/tools/dry_run has
the counts, experiments/benchmarks/memory.md what a step's peak is beside them). Others count as the nearest of these.
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


@dataclass(frozen=True, kw_only=True)
class Pass:
    """How a rank runs a forward pass and its backward."""

    budget: int
    """Tokens that it may have."""
    length: int
    """Of each sequence in it, tokens; they share nothing."""
    row: int
    """Longest packed row, tokens; for passes without shared prefixes."""
    size: int = FLOAT
    """Bytes of a number in the pass, over float32 weights."""
    checkpointing: str = "none"
    """What backward computes again (`trainer.gradient_checkpointing`): none, selective or full."""
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


def attended(how: Pass) -> tuple[int, int, int]:
    """Queries, keys and pairs of both that attention gathers for a pass, in tokens of a layer."""
    if how.cuda:  # FlexAttention: nothing is gathered, and there is no mask
        return how.tokens, how.tokens, 0
    if not how.trees:
        return how.tokens, how.tokens, how.tokens * how.row
    # On a CPU a sequence is cut into blocks of queries (`prl.trainer.tree.blocks`), each with all keys up to its end;
    # where there are several, those of one call are filled up to the longest: a third more.
    blocks = math.ceil(how.sequence / QUERIES)
    keys = how.tokens if blocks == 1 else how.tokens * (blocks + 1) * 2 // 3
    return how.tokens, keys, keys * min(QUERIES, how.sequence)


def layer_bytes(shape: ModelShape, how: Pass) -> float:
    """Bytes that autograd keeps of one layer."""
    queries, keys, pairs = attended(how)
    heads = shape.keys if how.cuda or how.trees else shape.queries  # transformers repeats them for a mask
    scales = 0 if shape.adapters else 2  # what the weights of norms are multiplied with, for their gradients
    norms = (4 + scales) * FLOAT if how.size == 4 else 2 * FLOAT + (2 + scales) * how.size
    floats = (
        how.tokens * 4 * shape.intermediate  # gate, its activation, up, their product
        + how.tokens * shape.queries  # the input of the projection after attention
        + queries * 2 * shape.queries  # queries, and what attention makes of them
        + keys * 2 * heads
        + how.tokens * 2 * shape.routed * shape.hidden  # what each token's experts take in, and what they make
        + (0 if how.trees else pairs)  # each layer casts the mask
    )
    of_heads = how.tokens * (shape.queries + shape.keys) * (FLOAT + how.size * (scales // 2)) if shape.qk_norm else 0
    sums = queries * shape.heads * FLOAT  # the logarithm of each softmax's sum
    return floats * how.size + how.tokens * shape.hidden * norms + of_heads + sums


def kept_bytes(shape: ModelShape, how: Pass) -> float:
    """Bytes of one layer that stay until its backward."""
    if how.checkpointing == "none":
        return layer_bytes(shape, how)
    own_input = how.tokens * shape.hidden * how.size
    if how.checkpointing == "full":
        return own_input
    queries, _, _ = attended(how)
    per_token = 2 * shape.intermediate + max(1, shape.routed) * shape.hidden + shape.queries + 2 * shape.keys
    if shape.adapters:
        per_token += per_token + shape.hidden  # what the adapters make beside the matrices
    # `prl.trainer.layers.KEPT`: what matrix products and attention make
    made = (how.tokens * per_token + queries * shape.queries) * how.size + queries * shape.heads * FLOAT
    return own_input + how.tokens * shape.hidden * how.size + made


def outer_bytes(shape: ModelShape, how: Pass) -> float:
    """Bytes that are kept once: of the last norm, the head's input, rotations, and the layout of attention."""
    queries, keys, pairs = attended(how)
    layout = pairs * how.size + (queries + keys) * 8 if how.trees else pairs
    wide = (1 if shape.adapters else 2) * shape.hidden + 2 * shape.head_dim
    return how.tokens * (shape.hidden * FLOAT + wide * how.size) + layout


def activations(shape: ModelShape, how: Pass) -> float:
    """Bytes that autograd keeps of a forward pass until its backward, but for copies of weights."""
    return shape.layers * kept_bytes(shape, how) + outer_bytes(shape, how)


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
        has beside; activations; `head`: logits and the gradient of the head.
    """
    whole = shape.parameters * FLOAT
    gathered = shape.outside + 2 * shape.layer + (0 if shape.adapters else shape.layer)
    return {
        "weights": (whole + shape.adapters * FLOAT) / shards,
        "gradients": shape.trained * FLOAT / shards,
        "optimiser": optimiser / shards,
        "reference": whole / shards if reference else 0,
        "gathered": how.size * gathered if how.spread else 0,  # what is outside of the layers, two layers, a gradient
        **pass_peak(shape, how),
    }


def pass_peak(shape: ModelShape, how: Pass) -> dict[str, float]:
    """Activations and `head` when they take most: at the head, or in the backward of the last layer."""
    from prl.trainer.logprobs import usual_chunk

    chunk = how.head_chunk or usual_chunk(shape.vocabulary, shape.hidden, cuda=how.cuda)
    logits = min(how.tokens, chunk) * shape.vocabulary * FLOAT
    head = 0 if shape.adapters else shape.vocabulary * shape.hidden * FLOAT  # its gradient
    kept = activations(shape, how)
    at_head = {"activations": kept, "head": max(2 * logits, logits + head)}
    if how.cuda and how.size == 2:  # a chunk's product in float32, before it is added, and a chunk of bfloat16 for it
        at_head["head"] = max(2 * logits, logits + logits / 2 + 2 * head)
    waiting = how.spread or shape.tied  # a tied head's gradient for the embedding's, a spread one's for the last layer
    recomputed = layer_bytes(shape, how) if how.checkpointing != "none" else 0
    at_layer = {
        "activations": kept - outer_bytes(shape, how) + 3 * how.tokens * shape.intermediate * how.size + recomputed,
        "head": (head * how.size / FLOAT if how.spread else head) * waiting,
    }
    return max(at_head, at_layer, key=lambda parts: sum(parts.values()))


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


def inprocess_engine_memory(
    shape: ModelShape, dtype: str, engine: VLLMConfig, max_model_len: int, *, updated: bool
) -> dict[str, float]:
    """What transformers' model in the process of a run holds, bytes by part.

    A batch has at most `max_num_seqs` sequences of `max_model_len`. New weights are loaded beside the old ones, in
    float32 first.
    """
    return {
        "weights": shape.parameters * SIZES[dtype],
        "update": shape.parameters * FLOAT * updated,
        "KV cache": engine.max_num_seqs * max_model_len * kv_bytes_per_token(shape, dtype),
    }


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
