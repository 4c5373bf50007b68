"""Sampling by the engine of vLLM's server, past its routes. Written for vLLM 0.31.0, as `_vllm_internals.py`."""

import math
import uuid
from typing import TYPE_CHECKING

import msgspec

from prl.inference.protocol import Generated, GenerateRequest, Sequence

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

LEAST = -9999.0
"""vLLM's stand-in for a logprob below it, as JSON has no infinities."""


async def sample(engine: "AsyncLLM", asked: GenerateRequest) -> Generated:
    """Sample as vLLM's `/inference/v1/generate` does, for the same parameters and seeds bit by bit the same.

    Raises vLLM's errors, ValueError and TypeError for what it refuses.
    """
    from vllm.exceptions import GenerationError
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    if engine.errored:
        raise engine.dead_error
    most = engine.vllm_config.scheduler_config.max_num_seqs
    if asked.sampling.get("n", 1) > most:
        raise ValueError(f"n must be at most the server's max_num_seqs ({most})")
    room = {"max_tokens": max(1, engine.model_config.max_model_len - len(asked.token_ids))}
    fixed = {"logprobs": 0, "flat_logprobs": True}  # of the sampled tokens alone
    if unknown := asked.sampling.keys() - set(SamplingParams.__struct_fields__):
        raise ValueError(f"no sampling parameters of vLLM's: {', '.join(sorted(unknown))}")
    try:
        params = msgspec.convert(room | asked.sampling | fixed, SamplingParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling: {error}") from error
    params.output_kind = RequestOutputKind.FINAL_ONLY
    prompt = tokens_input(asked.token_ids, cache_salt=asked.cache_salt)
    [final] = [each async for each in engine.generate(prompt, params, f"prl-{uuid.uuid4().hex}")]
    choices = []
    for output in final.outputs:
        token_ids = list(output.token_ids)
        if output.finish_reason == "error" or output.logprobs.token_ids != token_ids:
            raise GenerationError("the engine failed while it sampled")
        logprobs = list(map(measured, output.logprobs.logprobs))
        choices.append(Sequence(output.index, token_ids, logprobs, output.finish_reason or "stop"))
    return Generated(asked.model, asked.token_ids, choices)


def measured(logprob: float) -> float | None:
    """A logprob as JSON can say it; None where it is not a number, or above all numbers."""
    return max(logprob, LEAST) if logprob < math.inf else None
