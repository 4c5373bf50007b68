"""The engine core is asked for all continuations of a prompt in one message, and replies in one when all have ended.

vLLM's server sends it a request for each, and gets a message with each one's token after every pass, of which it makes
objects that nobody looks at. To be removed once vLLM's core takes requests with `n`, and leaves out outputs of those
for `FINAL_ONLY`. Written for the version of vLLM in `worker.py`.
"""

import asyncio
import copy
import inspect
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from prl.engines.protocol import Generated, Sampled, measured
from prl.engines.vllm.alive import while_alive

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCoreProc

METHOD = "prl_sample"
"""Our name for the core's method."""


# --- in the server ----------------------------------------------------------------------------------------------------


def takes(engine: "AsyncLLM", params: "SamplingParams") -> bool:
    """Return whether the core can sample this: it is patched, no text is searched, nothing is asked of the prompt."""
    from vllm.v1.engine.core import EngineCoreProc

    plain = not params.detokenize and params.prompt_logprobs is None and params.structured_outputs is None
    return plain and hasattr(EngineCoreProc, METHOD) and engine.vllm_config.parallel_config.data_parallel_size == 1


async def sample(
    engine: "AsyncLLM", prompt: Any, params: "SamplingParams", name: str, priority: int, adapter: "LoRARequest | None"
) -> bytes:
    """`Generated` as JSON. Raises what vLLM raises for what it refuses, GenerationError if sampling failed."""
    from vllm.exceptions import GenerationError

    tasks = await engine.get_supported_tasks()
    request = engine.input_processor.process_inputs(
        name, prompt, params, tasks, lora_request=adapter, priority=priority
    )
    request.client_index = engine.engine_core.client_index
    call = engine.engine_core.call_utility_async(METHOD, msgspec.msgpack.encode(request))
    try:
        reply: bytes | None = await while_alive(engine, call)
    except asyncio.CancelledError:
        await engine.engine_core.abort_requests_async([child_name(name, index) for index in range(params.n)])
        raise
    if reply is None:
        raise GenerationError("the engine failed while it sampled")
    return reply


# --- in the core ------------------------------------------------------------------------------------------------------


class Group:
    """The continuations of a prompt while they run."""

    def __init__(self, prompt: list[int], n: int):
        self.reply = Generated(prompt, [Sampled(index, [], [], None) for index in range(n)])
        self.open, self.failed = n, False
        self.result: Future[bytes | None] = Future()

    def take(self, index: int, output: "EngineCoreOutput") -> None:
        """Add what a continuation has sampled in a pass; with the last, the result is there."""
        sampled = self.reply.choices[index]
        if tokens := output.new_token_ids:
            sampled.token_ids += tokens
            ids, logprobs, *_ = output.new_logprobs
            self.failed |= ids[:, 0].tolist() != tokens
            sampled.logprobs += map(measured, logprobs[:, 0].tolist())
        if output.finish_reason is not None:
            sampled.finish_reason = str(output.finish_reason)
            self.failed |= sampled.finish_reason == "error"
            self.open -= 1
            if not self.open:
                self.result.set_result(None if self.failed else msgspec.json.encode(self.reply))


def reply_once() -> None:
    """Patch vLLM in this process and those that it forks."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core import EngineCoreProc

    update, decoder = Scheduler.update_from_output, msgspec.msgpack.Decoder(EngineCoreRequest)

    def prl_sample(core: "EngineCoreProc", data: bytes) -> "Future[bytes | None]":
        request = decoder.decode(data)
        group = Group(request.prompt_token_ids, request.sampling_params.n)
        for index in range(request.sampling_params.n):
            child, wave = core.preprocess_add_request(child_of(request, index))
            vars(child)["prl_group"] = group, index
            core.add_request(child, wave)
        return group.result

    def update_from_output(
        scheduler: "Scheduler", scheduled: "SchedulerOutput", result: Any
    ) -> "dict[int, EngineCoreOutputs]":
        groups = {name: groups_of(scheduler, name) for name in scheduled.num_scheduled_tokens}
        messages = update(scheduler, scheduled, result)
        for message in messages.values():
            others = []
            for output in message.outputs:
                if (place := groups.get(output.request_id)) is None:
                    others.append(output)
                else:
                    place[0].take(place[1], output)
            message.outputs = others
        return {
            client: message
            for client, message in messages.items()
            if message.outputs or message.finished_requests or message.scheduler_stats is not None
        }

    prl_sample.__signature__ = inspect.signature(prl_sample)  # type: ignore[attr-defined]  # looked up in each call
    setattr(EngineCoreProc, METHOD, prl_sample)
    Scheduler.update_from_output = update_from_output


def groups_of(scheduler: "Scheduler", name: str) -> tuple[Group, int] | None:
    """The group of a request that runs, and its place there; None = vLLM's server has asked for it."""
    return vars(scheduler.requests[name]).get("prl_group") if name in scheduler.requests else None


def child_of(request: "EngineCoreRequest", index: int) -> "EngineCoreRequest":
    """The request for one continuation, as vLLM's `ParentRequest` makes it."""
    child, params = copy.copy(request), copy.copy(request.sampling_params)
    child.request_id, child.sampling_params = child_name(request.request_id, index), params
    params.n = 1
    if params.seed is not None:
        params.seed += index
    return child


def child_name(name: str, index: int) -> str:
    """The id of a continuation."""
    return f"{index}_{name}"
