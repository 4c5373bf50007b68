"""The memory of a vLLM server, as plain arithmetic over a model's sizes."""

from typing import Any

from prl.config.hardware import CUDA_CONTEXT, GIB
from prl.config.model_shape import NUMBER_BYTES, ModelShape
from prl.engines.base import EngineMemory

BLOCKS = {"cpu": 128, "cuda": 16}
"""Tokens of a block of vLLM's KV cache, unless `block-size` says otherwise."""
GPU_TOKENS = 8192
"""Tokens that vLLM runs at once on a GPU to see what it needs beside the KV cache, by default."""


def kv_bytes_per_token(shape: ModelShape, dtype: str, tensor_parallel: int = 1) -> int:
    """Return the bytes of one token in the KV cache of one device."""
    heads = max(1, shape.kv_heads // tensor_parallel)
    return shape.layers * 2 * heads * shape.head_dim * NUMBER_BYTES[dtype]


def kv_tokens(shape: ModelShape, dtype: str, device: str, cache_bytes: float, tensor_parallel: int = 1) -> int:
    """Return the tokens that a KV cache of so many bytes a device holds, in whole blocks."""
    return int(cache_bytes // (BLOCKS[device] * kv_bytes_per_token(shape, dtype, tensor_parallel))) * BLOCKS[device]


def engine_memory(
    shape: ModelShape, dtype: str, engine: Any, *, share: float | None, updated: bool
) -> dict[str, float]:
    """Return what an engine holds on each of its devices, bytes by part.

    On a CPU it keeps a second, packed copy of the head, and new weights are loaded and packed beside the old ones, for
    which the C library keeps the memory.

    Args:
        shape: of the model.
        dtype: of its weights there.
        engine: the engine's node.
        share: bytes that it may take of each GPU; None = it runs on a CPU.
        updated: whether it takes the weights of a policy that is trained.
    """
    size = NUMBER_BYTES[dtype]
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


def predicted(engine: Any, shape: ModelShape, dtype: str, *, gpu_bytes: float | None, updated: bool) -> EngineMemory:
    """As `Engine.memory`."""
    share = None if gpu_bytes is None else gpu_bytes * engine.gpu_memory_utilization - CUDA_CONTEXT
    parts = engine_memory(shape, dtype, engine, share=share, updated=updated)
    spans = 1 if share is None else engine.tensor_parallel_size
    device = "cpu" if share is None else "cuda"
    return EngineMemory(parts, kv_tokens(shape, dtype, device, parts["KV cache"], spans))
