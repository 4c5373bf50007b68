"""The continuations of a prompt as one message to vLLM's engine core, and one back.

vLLM's server sends a request for each, and after every forward pass gets a message with each one's token, of which it
makes objects for text, ranks and statistics. Here the core makes the same requests and keeps what they sample until all
have ended. Written for vLLM 0.31.0, as `_vllm_internals.py`.
"""

import inspect
import math
import time
from concurrent.futures import Future
from copy import copy
from typing import TYPE_CHECKING, Any

import msgspec

from prl.inference.protocol import Generated, Sequence

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCoreProc

LEAST = -9999.0
"""vLLM's stand-in for a logprob below it, as JSON has no infinities."""
STATISTICS_EVERY_S = 0.25
"""[s] The core tells the server, while it works, no more often how many requests it has and how full its cache is."""
METHOD = "prl_sample"
"""Our name for the core's method."""


# --- in the server ----------------------------------------------------------------------------------------------------


def install() -> None:
    """Give engine cores that are forked from this process the method that `Groups.sample` calls."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core import EngineCoreProc

    decoder = msgspec.msgpack.Decoder(EngineCoreRequest)

    def prl_sample(core: "EngineCoreProc", data: bytes, model: str) -> "Future[bytes | None]":
        if not hasattr(core, "prl_groups"):
            core.prl_groups = Collector(core)
        return core.prl_groups.begin(decoder.decode(data), model)

    prl_sample.__signature__ = inspect.signature(prl_sample)  # type: ignore[attr-defined]  # looked up in each call
    setattr(EngineCoreProc, METHOD, prl_sample)


class Groups:
    """What a server asks of its core."""

    def __init__(self, engine: "AsyncLLM"):
        self.engine = engine
        self.handler: Any = None

    def takes(self, params: "SamplingParams") -> bool:
        """Whether the core can sample this: nothing of it is searched for in text or waits outside the core."""
        from vllm.v1.engine.core import EngineCoreProc

        engine, limits = self.engine, self.engine.vllm_config.scheduler_config
        return not (
            params.detokenize
            or params.prompt_logprobs is not None
            or params.structured_outputs is not None
            or engine.log_requests
            or engine.output_processor.tracing_enabled
            or engine.vllm_config.parallel_config.data_parallel_size > 1
            or limits.max_num_queued_reqs is not None
            or limits.max_num_queued_tokens is not None
            or not hasattr(EngineCoreProc, METHOD)
        )

    async def sample(self, prompt: Any, params: "SamplingParams", request_id: str, model: str) -> bytes:
        """`Generated` as JSON.

        Raises what vLLM raises for what it refuses, GenerationError if sampling failed, EngineDeadError.
        """
        from vllm.exceptions import GenerationError
        from vllm.v1.engine.exceptions import EngineDeadError

        engine, core = self.engine, self.engine.engine_core
        tasks = await engine.get_supported_tasks()
        request = engine.input_processor.process_inputs(request_id, prompt, params, tasks)
        request.client_index = core.client_index
        self._watch()
        try:
            reply = await core.call_utility_async(METHOD, msgspec.msgpack.encode(request), model)
        except EngineDeadError:
            raise
        except Exception as error:  # what the core says, also that it is about to end
            raise GenerationError(str(error)) from error
        except BaseException:
            await core.abort_requests_async([child_id(request_id, index) for index in range(params.n)])
            raise
        if reply is None:
            raise GenerationError("the engine failed while it sampled")
        return reply

    def _watch(self) -> None:
        """Have calls to the core fail when it dies: vLLM would leave them unanswered."""
        engine = self.engine
        engine._run_output_handler()
        if engine.output_handler is not self.handler:
            self.handler = engine.output_handler
            self.handler.add_done_callback(lambda _: self._fail())

    def _fail(self) -> None:
        for waiting in list(self.engine.engine_core.utility_results.values()):
            if not waiting.done():
                waiting.set_exception(self.engine.dead_error)


# --- in the core ------------------------------------------------------------------------------------------------------


class Group:
    """Continuations that run."""

    def __init__(self, model: str, prompt_token_ids: list[int], n: int):
        self.reply = Generated(model, prompt_token_ids, [Sequence(index, [], [], None) for index in range(n)])
        self.open = n
        self.failed = False
        self.result: Future[bytes | None] = Future()

    def end(self, whole: bool = True) -> None:
        """One more has ended, or been given up."""
        self.open -= 1
        self.failed |= not whole
        if not self.open:
            self.result.set_result(None if self.failed else msgspec.json.encode(self.reply))


class Collector:
    """Keeps the outputs of groups from the messages to the server."""

    def __init__(self, core: "EngineCoreProc"):
        self.core = core
        self.children: dict[str, tuple[Group, Sequence]] = {}
        """By request id: the continuations that run."""
        self.told_s = 0.0
        self.put, self.abort, self.statistics = (
            core.output_queue.put_nowait,
            core.abort_requests,
            core.scheduler.make_stats,
        )
        core.output_queue.put_nowait = self.put_others
        core.abort_requests = self.abort_and_forget
        core.scheduler.make_stats = self.statistics_now_and_then

    def begin(self, request: "EngineCoreRequest", model: str) -> "Future[bytes | None]":
        """Add a request's continuations to the scheduler; the JSON of `Generated`, or None if one fails or is aborted.

        Each is the request that vLLM's `ParentRequest` would make.
        """
        group = Group(model, request.prompt_token_ids, request.sampling_params.n)
        children = [child_of(request, sequence.index) for sequence in group.reply.choices]
        try:
            for child, sequence in zip(children, group.reply.choices, strict=True):
                self.core.add_request(*self.core.preprocess_add_request(child))
                self.children[child.request_id] = group, sequence
        except BaseException:
            self.abort_and_forget([child.request_id for child in children])
            raise
        return group.result

    def put_others(self, item: Any) -> None:
        """Put a message to the server into the queue, without what belongs to groups."""
        if self.children and isinstance(item, tuple) and (outputs := item[1].outputs):
            left = [each for each in outputs if not self.take(each)]
            if not left and item[1].scheduler_stats is None and not item[1].finished_requests:
                return
            item[1].outputs = left
        self.put(item)

    def take(self, output: "EngineCoreOutput") -> bool:
        """Whether an output belongs to a group, which keeps it."""
        if (found := self.children.get(output.request_id)) is None:
            return False
        group, sequence = found
        whole = True
        if tokens := output.new_token_ids:
            sequence.token_ids += tokens
            ids, logprobs, *_ = output.new_logprobs
            whole = ids[:, 0].tolist() == tokens
            sequence.logprobs += map(measured, logprobs[:, 0].tolist())
        if output.finish_reason is not None:
            sequence.finish_reason = str(output.finish_reason)
            del self.children[output.request_id]
            group.end(whole and sequence.finish_reason != "error")
        else:
            group.failed |= not whole
        return True

    def abort_and_forget(self, request_ids: list[str]) -> None:
        """Abort requests, of which the server wants to hear no more."""
        self.abort(request_ids)
        for request_id in request_ids:
            if found := self.children.pop(request_id, None):
                found[0].end(whole=False)

    def statistics_now_and_then(self, *args: Any, **named: Any) -> Any:
        """What vLLM's scheduler counts; None while it works and has said so just now, so that counts add up."""
        now_s, working = time.monotonic(), self.core.scheduler.has_unfinished_requests()
        if working and now_s - self.told_s < STATISTICS_EVERY_S and not any((*args, *named.values())):
            return None
        self.told_s = now_s
        return self.statistics(*args, **named)


def child_of(request: "EngineCoreRequest", index: int) -> "EngineCoreRequest":
    """The request for one continuation."""
    child, params = copy(request), copy(request.sampling_params)
    child.request_id, child.sampling_params = child_id(request.request_id, index), params
    params.n = 1
    if params.seed is not None:
        params.seed += index
    return child


def child_id(request_id: str, index: int) -> str:
    """The id of a continuation, as vLLM would make it."""
    return f"{index}_{request_id}"


def measured(logprob: float) -> float | None:
    """A logprob as JSON can say it; None where it is not a number, or above all numbers."""
    return max(logprob, LEAST) if logprob < math.inf else None
