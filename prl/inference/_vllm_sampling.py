"""Sampling by the engine of vLLM's server, past its routes. Written for vLLM 0.31.0, as `_vllm_internals.py`."""

import uuid

import msgspec

from prl.inference._vllm_groups import Groups, measured
from prl.inference.protocol import Generated, GenerateRequest, Sequence


async def sample(groups: Groups, asked: GenerateRequest) -> bytes:
    """Sample as vLLM's `/inference/v1/generate` does, for the same parameters and seeds bit by bit the same.

    Returns:
        `Generated` as JSON.

    Raises vLLM's errors, ValueError and TypeError for what it refuses.
    """
    from vllm.exceptions import GenerationError
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    engine = groups.engine
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
    prompt, request_id = tokens_input(asked.token_ids, cache_salt=asked.cache_salt), f"prl-{uuid.uuid4().hex}"
    if groups.takes(params):
        return await groups.sample(prompt, params, request_id, asked.model)
    [final] = [each async for each in engine.generate(prompt, params, request_id)]
    choices = []
    for output in final.outputs:
        token_ids = list(output.token_ids)
        if output.finish_reason == "error" or output.logprobs.token_ids != token_ids:
            raise GenerationError("the engine failed while it sampled")
        logprobs = list(map(measured, output.logprobs.logprobs))
        choices.append(Sequence(output.index, token_ids, logprobs, output.finish_reason or "stop"))
    return msgspec.json.encode(Generated(asked.model, asked.token_ids, choices))
