"""Play tasks: drive the token-in/token-out client directly and record verifiers traces.

All rollouts of a group start from the same prompt, so their turn is one request for `n` continuations. Where
somebody answers the model, `conversation.py` plays; where a program is needed around it (tool servers, a runtime),
`needs_program` finds that and `program.py` plays.
"""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens, ToolCallParseStatus
from verifiers.v1 import graph
from verifiers.v1 import task as verifiers_task
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.task import Task
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import AgentInfo, TimeSpan, Trace, TraceTask
from verifiers.v1.types import (
    AssistantMessage,
    Message,
    Response,
    SystemMessage,
    ToolCall,
    TurnTokens,
    Usage,
    UserMessage,
)
from verifiers.v1.utils import decorators

from prl.episodes.tools import MalformedToolCall, contained, escaped, in_process
from prl.inference.client import Completion, EngineError
from prl.inference.sampler import OverlongPrompt, Sampler
from prl.rollouts.messages import encodable
from prl.rollouts.rollout import Rollout
from prl.rollouts.token_integrity import Call, Digest, TokenMismatch

Arrived = Callable[[Rollout], Awaitable[None]]


def _plain(factory: Callable[[], Any]) -> Callable[[], Any]:
    """`factory` as a Python function."""
    return lambda: factory()


# A turn makes its nodes with `model_construct`, which looks at the signature of every default factory it calls. That of
# a builtin (`list`, `time.time`) has to be parsed from text each time: more than half of what a rollout cost here.
for _field in graph.MessageNode.model_fields.values():
    if inspect.isbuiltin(_field.default_factory) or inspect.isclass(_field.default_factory):
        _field.default_factory = _plain(_field.default_factory)


async def _invoke_all(signals: list[Callable[..., Any]], available: dict[str, Any]) -> list[Any]:
    """As verifiers', which runs each grader in a task of its own."""
    return await asyncio.gather(*(contained(decorators.invoke, signal, available) for signal in signals))


verifiers_task.invoke_all = _invoke_all

AGENT = AgentInfo.model_construct(config=WireAgentConfig.model_construct(), runtime=None, name="agent", trainable=True)


def needs_program(taskset: Taskset, task: Task) -> str | None:
    """Why a task of this taskset cannot be played by driving the client directly; None if it can."""
    cls = type(task)
    if not in_process([*taskset.toolsets(taskset.config), *cls.toolsets(task.config)]):
        return "its tasks call tools that run in processes of their own"
    if cls.NEEDS_CONTAINER:
        return "its tasks need a container"
    for hook in ("setup", "finalize"):
        if getattr(cls, hook) is not getattr(Task, hook):
            return f"its tasks have a {hook} hook that works on a runtime"
    for signal in (*task.hooks("reward"), *task.hooks("metric")):
        runtime = inspect.signature(signal).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"{signal.__name__} reads a runtime"
    if task.plugged_judges():
        return "it has judges"
    if task.data.prompt is None:
        return "its tasks have no prompt: a simulated user opens the conversation"
    return None


async def play_group(
    env_name: str, task: Task, n: int, sampler: Sampler, *, group_id: int, timeout_s: float, arrived: Arrived
) -> list[Rollout]:
    """`n` rollouts of one task, scored, with samples attached. One that failed carries its reason in `error`.

    `arrived` is awaited with each rollout as soon as it is graded; that is no part of `timeout_s`.
    """
    trace_task = on_trace(task)
    rollouts = [
        Rollout(
            Trace(task=trace_task, agent=AGENT),
            env_name=env_name,
            group_id=group_id,
            start_version=sampler.version,
            temperature=sampler.config.temperature,
        )
        for _ in range(n)
    ]
    deadline = asyncio.get_running_loop().time() + timeout_s
    late = too_late(env_name, timeout_s)
    try:
        async with asyncio.timeout_at(deadline):
            await _answer(task, rollouts, sampler, f"{env_name}/{trace_task.key}/{group_id}")
    except (EngineError, OverlongPrompt) as error:
        for rollout in rollouts:
            rollout.fail(error)
    except TimeoutError:
        for rollout in rollouts:
            rollout.fail(late)
    else:
        await asyncio.gather(*(_finish(task, rollout, deadline, late, arrived) for rollout in rollouts))
    return rollouts


async def _answer(task: Task, rollouts: list[Rollout], sampler: Sampler, key: str) -> None:
    messages = opening(task)
    rendered = sampler.renderer.render([message_to_wire(m) for m in messages], add_generation_prompt=True)
    started = time.time()
    completions = await sampler.complete(rendered.token_ids, n=len(rollouts), key=key)
    span = TimeSpan(start=started, end=time.time())
    for rollout, completion in zip(rollouts, completions, strict=True):
        rollout.end_version = sampler.version
        commit(graph.prepare_turn(rollout.trace, messages), rendered, completion, sampler, span)


async def _finish(task: Task, rollout: Rollout, deadline: float, late: TimeoutError, arrived: Arrived) -> None:
    await _grade(task, rollout, deadline, late)
    await arrived(rollout)


async def _grade(task: Task, rollout: Rollout, deadline: float, late: TimeoutError) -> None:
    """Score one rollout. A grader is the env author's code: its failure or delay is this rollout's alone."""
    try:
        async with asyncio.timeout_at(deadline) as clock:
            await task.score(rollout.trace)
        check_reward(rollout.trace)
    except (Exception, *NOT_MEANT) as error:
        error = meant(error)  # a cancellation counts even if the deadline passes just then
        rollout.fail(late if clock.expired() else error)
        return
    try:
        rollout.attach_samples()
    except TokenMismatch as error:
        rollout.fail(error)
        return
    rollout.trace.ok = rollout.trace.is_completed = True


NOT_MEANT = (asyncio.CancelledError, SystemExit)
"""What ends more than the code that raises it; an env's code may let one slip."""


def meant(error: BaseException) -> Exception:
    """The error as a failure of the code that raised it; raises it again where somebody cancels the task around it."""
    if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
        raise error
    return error if isinstance(error, Exception) else escaped(error)


def too_late(env_name: str, timeout_s: float) -> TimeoutError:
    return TimeoutError(f"no end after {timeout_s:g} s (timeout_s or group_timeout_s of envs.{env_name})")


MAX_REWARD = 3e38  # what a float32 holds: credit is a difference of rewards, and has to be finite


def check_reward(trace: Trace) -> None:
    """A reward that is no number would make its whole group's credit none."""
    if not abs(trace.reward) <= MAX_REWARD:
        raise ValueError(f"the grader gave reward {trace.reward}")


def on_trace(task: Task) -> TraceTask:
    """The task as its traces carry it."""
    return TraceTask.model_construct(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def opening(task: Task) -> list[Message]:
    """The messages a task's conversation starts with."""
    prompt = task.data.prompt
    messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
    system = task.data.system_prompt
    return messages if system is None else [SystemMessage(content=system), *messages]


def commit(
    turn: graph.PendingTurn,
    rendered: RenderedTokens,
    completion: Completion,
    sampler: Sampler,
    span: TimeSpan,
    *,
    bridged: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> AssistantMessage:
    """Add one turn to its trace's message graph, the exact tokens that were sent and sampled. Returns what was said.

    `bridged`: `rendered` extends the tokens of the turn before, and attributes only what it adds to messages. `tools`: what
    the model may call; raises MalformedToolCall, with the turn in the trace, where it calls one in a way that cannot be read.
    """
    finish = completion.finish_reason
    usage = Usage(prompt_tokens=len(rendered.token_ids), completion_tokens=len(completion.token_ids))
    tokens = TurnTokens.model_construct(
        prompt_ids=rendered.token_ids,
        completion_ids=completion.token_ids,
        completion_logprobs=completion.logprobs,
        message_spans=turn.prompt_message_spans(rendered) if bridged else rendered.message_token_spans(),
        is_content=rendered.is_content,
        bridged=bridged,
    )
    message, malformed = parse(completion.token_ids, sampler.renderer, tools)
    if finish == "length":  # what was cut off calls nothing
        malformed = None
    if malformed is not None and (tokenizer := getattr(sampler.renderer, "_tokenizer", None)) is not None:
        message = AssistantMessage(
            content=encodable(tokenizer.decode(completion.token_ids))
        )  # all of it, to be looked at
    response = Response.model_construct(
        id="", created=0, model=sampler.pool.model, message=message, finish_reason=finish, usage=usage, tokens=tokens
    )
    node = turn.commit(response)
    turn.trace.calls.append(
        Call.model_construct(
            node=node,
            model=sampler.pool.model,
            sampling=None,
            endpoint=None,
            finish_reason=finish,
            usage=usage,
            time=span,
            error=None,
            policy=None,
            acp=None,
            digest=Digest().add(rendered.token_ids).add(completion.token_ids).value(),
        )
    )
    if finish == "length":
        turn.trace.stop("max_output_tokens")
    if malformed is not None:
        raise malformed
    return message


def parse(
    token_ids: list[int], renderer: Any, tools: list[dict[str, Any]] | None = None
) -> tuple[AssistantMessage, MalformedToolCall | None]:
    """What the model said, as a message; and what is wrong with a tool call in it, if it was offered any tools.

    A call of a tool that does not exist is well formed.
    """
    try:
        parsed = renderer.parse_response(token_ids, tools=tools)
    except (ValueError, RecursionError) as error:  # what Python's JSON reader refuses: endless nesting, endless numbers
        unread = ParsedToolCall(raw=str(error), status=ToolCallParseStatus.MALFORMED_STRUCTURE)
        parsed = ParsedResponse(content="", tool_calls=[unread])
    attempts = parsed.tool_calls or []
    for call in attempts:
        if call.status == ToolCallParseStatus.OK and not isinstance(call.name, str):
            call.status = ToolCallParseStatus.MISSING_NAME
    calls = [
        ToolCall(
            id=call.id or f"call_{index}",
            name=encodable(call.name),
            arguments=encodable(call.arguments)
            if isinstance(call.arguments, str)
            else json.dumps(call.arguments or {}),
        )
        for index, call in enumerate(attempts)
        if call.name and isinstance(call.name, str)
    ]
    message = AssistantMessage(
        content=parsed.content or None, reasoning_content=parsed.reasoning_content, tool_calls=calls or None
    )
    wrong = [call for call in attempts if call.status not in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)]
    if not tools or not wrong:
        return message, None
    return message, MalformedToolCall(f"{wrong[0].status.replace('_', ' ')}: {wrong[0].raw[:200]}")
