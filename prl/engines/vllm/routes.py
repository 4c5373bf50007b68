"""vLLM endpoint plugin (entry point `vllm.endpoint_plugins`): the routes that prl adds to the server.

One samples, past the objects that vLLM's own route makes of each logprob; one loads new weights. Pausing, loading,
clearing the prefix cache and resuming are one request, so a client that dies half-way leaves no paused engine behind,
and vLLM's development routes stay off.
"""

import asyncio
import functools
import os
import time
import uuid
from argparse import Namespace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from prl.engines.protocol import FROZEN_VARIABLE, GENERATE, LOAD, Generated, GenerateRequest, Sampled, measured
from prl.engines.vllm.adapters import Adapters
from prl.engines.vllm.alive import while_alive
from prl.engines.vllm.cpu import pictures as on_cpu
from prl.engines.vllm.cpu import replies
from prl.engines.vllm.server import INSTANCE_VARIABLE
from prl.engines.vllm.weights import WeightsError, folder_of, refuse_other_policy, shapes_at

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.inputs.engine import EngineInput
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from prl.engines.vllm.pictures import Pictures

REQUESTS = msgspec.json.Decoder(GenerateRequest)


class PolicyRoutes:
    """`POST /prl/generate` samples, `POST /prl/load_policy` loads new weights."""

    name = "prl"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; that for weights unless the server's model is frozen."""
        app.add_route(GENERATE, generate, methods=["POST"])  # starlette's: nothing of FastAPI's for each request
        if not os.environ.get(FROZEN_VARIABLE):
            app.add_api_route(LOAD, load_policy, methods=["POST"])

    async def init_state(self, engine_client: "AsyncLLM", state: "State", args: Namespace) -> None:
        """Prepare what the routes need besides the engine."""
        state.served_names = args.served_model_name or [args.model]
        # Two loads at a time would leave the engine with parts of both.
        state.load_policy_lock = asyncio.Lock()
        model = engine_client.vllm_config.model_config
        tied = getattr(model.hf_config, "tie_word_embeddings", False)
        state.check_weights = functools.partial(refuse_other_policy, started=shapes_at(model.model), tied=tied)
        lora = engine_client.vllm_config.lora_config
        state.adapters = Adapters(engine_client, state.check_weights, 0 if lora is None else lora.max_loras)
        state.pictures = None
        if model.is_multimodal_model:
            from prl.engines.vllm.pictures import Pictures

            processor = engine_client.renderer.get_mm_processor()
            state.pictures = Pictures(processor, read_in_core=bool(os.environ.get(on_cpu.VARIABLE)))


# --- sampling ---------------------------------------------------------------------------------------------------------


async def generate(request: Request) -> Response:
    """Sample continuations of a prompt, until the client goes away.

    Returns:
        200 with `Generated`; with `error` 400 or 404. What vLLM raises is answered as on its own routes.
    """
    try:
        asked = REQUESTS.decode(await request.body())
        params = params_of(asked)
        prompt = prompt_of(asked, request.app.state.pictures)
    except ValueError as error:  # msgspec's are ValueErrors too
        return JSONResponse({"error": f"no request to sample: {error}"}, status_code=400)
    if asked.model not in request.app.state.served_names:
        return JSONResponse({"error": f"the model {asked.model!r} is not served here"}, status_code=404)
    work = asyncio.ensure_future(sample_with_adapter(request.app.state, asked, prompt, params))
    # vLLM would sample to the end for nobody.
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # nobody will see it
        return Response(await work, media_type="application/json")
    except WeightsError as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    finally:
        gone.cancel()
        work.cancel()


async def disconnected(request: Request) -> None:
    """Return once the client has gone. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def params_of(asked: GenerateRequest) -> "SamplingParams":
    """The request's sampling parameters. Raises ValueError for those that vLLM does not have or cannot use."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    if unknown := asked.sampling.keys() - set(SamplingParams.__struct_fields__):
        raise ValueError(f"no sampling parameters of vLLM's: {', '.join(sorted(unknown))}")
    of_sampled_tokens = {"logprobs": 0, "flat_logprobs": True}
    params = msgspec.convert(asked.sampling | of_sampled_tokens, SamplingParams)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def prompt_of(asked: GenerateRequest, pictures: "Pictures | None") -> "EngineInput":
    """Return the request's prompt as vLLM takes it. Raises ValueError where it cannot have its pictures."""
    from vllm.inputs.engine import tokens_input

    if pictures is not None:
        return pictures.input_of(asked)
    if asked.pictures:
        raise ValueError("the model sees no pictures")
    return tokens_input(asked.token_ids, cache_salt=asked.cache_salt)


async def sample_with_adapter(
    state: "State", asked: GenerateRequest, prompt: "EngineInput", params: "SamplingParams"
) -> bytes:
    """Sample with the adapter that is asked for, which the engine keeps meanwhile. Raises as `sample`, and WeightsError
    for an adapter that the engine cannot have."""
    async with state.adapters.using(asked.adapter) as adapter:
        return await sample(state.engine_client, asked, prompt, params, adapter)


async def sample(
    engine: "AsyncLLM",
    asked: GenerateRequest,
    prompt: "EngineInput",
    params: "SamplingParams",
    adapter: "LoRARequest | None",
) -> bytes:
    """Sample as vLLM's `/inference/v1/generate` does, for the same parameters and seeds bit by bit the same.

    Returns:
        `Generated` as JSON.

    Raises vLLM's errors.
    """
    name = f"prl-{uuid.uuid4().hex}"
    if replies.takes(engine, params):
        return await replies.sample(engine, prompt, params, name, asked.priority, adapter)
    outputs = engine.generate(prompt, params, name, lora_request=adapter, priority=asked.priority)
    [reply] = [final async for final in outputs]
    return msgspec.json.encode(generated(reply, asked.token_ids))


def generated(reply: "RequestOutput", prompt: list[int]) -> Generated:
    """Return what the client is sent of the engine's output. Raises GenerationError where the engine failed
    half-way."""
    from vllm.exceptions import GenerationError

    choices = []
    for output in reply.outputs:
        token_ids = list(output.token_ids)
        if output.finish_reason == "error" or output.logprobs.token_ids != token_ids:
            raise GenerationError("the engine failed while it sampled")
        logprobs = [measured(logprob) for logprob in output.logprobs.logprobs]
        choices.append(Sampled(output.index, token_ids, logprobs, output.finish_reason or "stop"))
    if reply.prompt_logprobs is None:
        return Generated(prompt, choices)
    rows = rows_of(reply.prompt_logprobs)
    own = [row.get(token_id) for token_id, row in zip(prompt, rows, strict=True)]
    return Generated(prompt, choices, own, [list(row.items()) for row in rows])


def rows_of(flat: "FlatLogprobs") -> list[dict[int, float | None]]:
    """The logprob of each token id in each place of a prompt; of none in the first.

    vLLM lists the prompt's own token and then the most likely ones, often with that token again. Its iterator would
    make an object of each.
    """
    pairs = list(zip(flat.token_ids, map(measured, flat.logprobs), strict=True))
    return [dict(pairs[start:end]) for start, end in zip(flat.start_indices, flat.end_indices, strict=True)]


# --- new weights ------------------------------------------------------------------------------------------------------


async def load_policy(
    request: Request,
    path: Annotated[str | None, Body()] = None,
    init: Annotated[dict[str, Any] | None, Body()] = None,
    update: Annotated[dict[str, Any] | None, Body()] = None,
) -> JSONResponse:
    """Load new weights and keep the running requests, which are recomputed under them and go on.

    Args:
        request: the request.
        path: a folder of weights.
        init: instead of a path, where the engine meets the sender of weights, as vLLM's weight transfer is told it.
        update: likewise, what the sender sends.

    Returns:
        200 with `loaded`, the `seconds` it took and the server's `instance`; with `error` 400 (no weights there: the
        old ones stay) or 500 (weights unknown: the engine stays paused)
    """
    state = request.app.state
    if (path is None) == (init is None or update is None):
        return JSONResponse({"error": "give the path of a folder, or init and update"}, status_code=400)
    async with state.load_policy_lock:
        try:
            if path is not None:
                folder = await asyncio.to_thread(folder_of, path)
                await asyncio.to_thread(state.check_weights, folder)
                update = {"path": str(folder)}
        except WeightsError as error:
            return JSONResponse({"error": f"{error}: the weights stay as they are"}, status_code=400)
        began = time.monotonic()
        try:
            await while_alive(state.engine_client, load(state.engine_client, update or {}, init))
        except Exception as error:  # whatever the workers raise: the caller has to know that the old weights are gone
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)
        state.adapters.forget()
        answer = {"loaded": path or "what was sent", "seconds": time.monotonic() - began}
        return JSONResponse(answer | {"instance": os.environ.get(INSTANCE_VARIABLE)})


async def load(engine: "AsyncLLM", update: dict[str, Any], init: dict[str, Any] | None) -> None:
    """Pause, go through the phases of vLLM's weight transfer, forget what is cached under old weights, resume."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    if init is not None:
        await engine.init_weight_transfer_engine(WeightTransferInitRequest(init))
    # `engine.pause_generation` does this and then sleeps 20 ms, to order outputs that are kept anyway.
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest(update))
    await engine.finish_weight_update()
    if not await engine.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("prefixes cached under older weights are still in use")
    if engine.vllm_config.model_config.is_multimodal_model:
        await engine.reset_encoder_cache()  # what the older weights have seen in pictures
    await engine.resume_generation()
