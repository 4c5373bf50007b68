"""One turn of a conversation: its opening messages, the parsed reply, and its tokens in verifiers' message graph."""

import itertools
import json
from collections.abc import Sequence
from typing import Any, TypeVar

import verifiers.v1 as vf
from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens, Renderer, ToolCallParseStatus
from verifiers.v1 import graph
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.dialects import parse_message
from verifiers.v1.types import content_to_parts

from prl.engines.renderer import call_id, pictures_in, placeholders_of, tokenizer_of
from prl.engines.replies import Completion
from prl.engines.sampler import Sampler
from prl.rollouts.images import NOWHERE, Origin, is_picture, keep, url_of
from prl.rollouts.pictures import SCHEME, PictureStore
from prl.rollouts.rollout import encodable
from prl.rollouts.samples import RecordedCall, TokenMismatch, token_hash

WireTool = dict[str, Any]
"""A tool as it is declared to the model, in OpenAI's format."""

AGENT = vf.AgentInfo.model_construct(
    config=WireAgentConfig.model_construct(), runtime=None, name="agent", trainable=True
)
"""The agent of a single-turn rollout, and the template of the others."""
READABLE = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)


def trace_task(task: vf.Task) -> vf.TraceTask:
    """Return the task in the form that traces carry."""
    return vf.TraceTask.model_construct(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def opening_messages(data: vf.TaskData) -> list[vf.Message]:
    """Return the messages that a task's conversation starts with. Raises ValueError for a picture that is not kept."""
    messages = messages_of([] if data.prompt is None else data.prompt)
    return messages if data.system_prompt is None else [vf.SystemMessage(content=data.system_prompt), *messages]


TaskT = TypeVar("TaskT", bound=vf.Task)


def with_kept_pictures(task: TaskT, pictures: PictureStore | None) -> TaskT:
    """Return a task whose pictures are in the store, and references to them in its messages.

    Raises ValueError for a picture that cannot be read, or that the model does not see.
    """
    data = task.data
    if not isinstance(data.prompt, list) or not has_pictures(data.prompt):
        return task
    try:
        return task.with_data(prompt=messages_of(data.prompt, pictures, getattr(data, "_origin", NOWHERE)))
    except ValueError as error:
        place = getattr(data, "_place", "")
        raise ValueError(f"{place}: {error}" if place else str(error)) from error


def has_pictures(messages: Sequence[Any]) -> bool:
    """Return whether a message, of verifiers or in OpenAI's format, has a picture."""
    contents = [each.get("content") if isinstance(each, dict) else getattr(each, "content", None) for each in messages]
    return any(is_picture(part) for content in contents if isinstance(content, list) for part in content)


def messages_of(
    turn: str | Sequence[vf.Message | dict[str, Any]], pictures: PictureStore | None = None, origin: Origin = NOWHERE
) -> list[vf.Message]:
    """Return what is said in a turn as messages: a text is the user's; messages may be in OpenAI's format.

    The parts of a content become one text, as chat templates join them, unless there are pictures among them. These go
    into the store, and a reference takes their place. Raises ValueError for a picture that cannot be read, and where
    there is no store.
    """
    if isinstance(turn, str):
        return [vf.UserMessage(content=turn)]
    return [_message_of(message, number, pictures, origin) for number, message in enumerate(turn, start=1)]


def _message_of(
    message: vf.Message | dict[str, Any], number: int, pictures: PictureStore | None, origin: Origin
) -> vf.Message:
    content = message.get("content") if isinstance(message, dict) else message.content
    if isinstance(content, list):
        parts = kept_parts(content, f"message {number}", pictures, origin)
        is_text = all(part["type"] == "text" for part in parts)
        said = "".join(part["text"] for part in parts) if is_text else parts
        if isinstance(message, dict):
            message = message | {"content": said}
        else:
            message = message.model_copy(update={"content": content_to_parts(said)})
    return parse_message(message) if isinstance(message, dict) else message


def kept_parts(
    content: list[Any], where: str, pictures: PictureStore | None, origin: Origin = NOWHERE
) -> list[dict[str, Any]]:
    """Return the parts of a content in OpenAI's format, its pictures as references to the store.

    Raises ValueError, with the message `where`, for a part that the model is not shown.
    """
    parts: list[dict[str, Any]] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else getattr(part, "text", None)
        url = url_of(part) if is_picture(part) else ""
        if not (url or isinstance(text, str)) or (url and pictures is None and not url.startswith(SCHEME)):
            unseen = "pictures or sounds" if pictures is None else "sounds or videos"
            raise ValueError(f"{where} is no text: prl shows a model no {unseen} ({str(part)[:80]}…)")
        if url:
            reference = url if pictures is None else keep(pictures, url, origin)
            parts.append({"type": "image_url", "image_url": {"url": reference}})
        if text or not url:
            parts.append({"type": "text", "text": text})
    return parts


def declared_tools(data: vf.TaskData) -> list[WireTool] | None:
    """Return the tools that a task's data declares in its field `tools`, without code to carry out their calls."""
    tools = getattr(data, "tools", None)
    in_format = isinstance(tools, list) and all(isinstance(tool, dict) and "function" in tool for tool in tools)
    return tools if in_format else None  # else a field of the user's own


def commit(
    turn: graph.PendingTurn,
    rendered: RenderedTokens,
    completion: Completion,
    sampler: Sampler,
    span: vf.TimeSpan,
    *,
    bridged: bool = False,
    tools: list[WireTool] | None = None,
) -> vf.AssistantMessage:
    """Add one turn to its trace's message graph, with the exact tokens that were sent and sampled; return the reply.

    Args:
        turn: The pending turn, from `graph.prepare_turn`.
        rendered: The prompt that was sent.
        completion: The reply that was sampled.
        sampler: Where the reply comes from.
        span: When the model call began and ended.
        bridged: `rendered` extends the tokens of the turn before, and attributes only the added tokens to messages.
        tools: The tools that the model may call.
    """
    message = read(completion, sampler.renderer, rendered, tools)
    tokens = vf.TurnTokens(
        prompt_ids=rendered.token_ids,
        completion_ids=completion.token_ids,
        completion_logprobs=completion.logprobs,
        message_spans=turn.prompt_message_spans(rendered) if bridged else rendered.message_token_spans(),
        is_content=rendered.is_content,
        bridged=bridged,
    )
    about = {"model": sampler.pool.model, "finish_reason": completion.finish_reason}
    node = turn.commit(vf.Response.model_construct(id="", created=0, message=message, tokens=tokens, **about))
    record_call(turn.trace, node, rendered, completion, sampler, span)
    return message


def commit_sibling(
    trace: vf.Trace,
    first: vf.Trace,
    rendered: RenderedTokens,
    completion: Completion,
    sampler: Sampler,
    span: vf.TimeSpan,
    tools: list[WireTool] | None = None,
) -> None:
    """Add to an empty trace another reply to the prompt of `first`, which holds that prompt, its reply, nothing else.

    The graph is the one that `commit` makes, without hashing and comparing the prompt's messages again.
    """
    *prompt, reply = first.nodes
    scaffold = reply.token_ids[: len(reply.token_ids) - sum(reply.mask)]
    sampled = [False] * len(scaffold) + [True] * len(completion.token_ids)
    token_ids = scaffold + completion.token_ids
    node = graph.MessageNode(
        parent=reply.parent,
        message=read(completion, sampler.renderer, rendered, tools),
        sampled=True,
        token_ids=token_ids,
        renderer_token_ids=token_ids,
        mask=sampled,
        is_content=list(sampled) if reply.is_content else [],
        logprobs=completion.logprobs,
    )
    trace.nodes = [*(node.model_copy() for node in prompt), node]
    record_call(trace, len(prompt), rendered, completion, sampler, span)


def record_call(
    trace: vf.Trace,
    node: int,
    rendered: RenderedTokens,
    completion: Completion,
    sampler: Sampler,
    span: vf.TimeSpan,
) -> None:
    """Record on a trace the model call that sampled message `node`."""
    lengths = {"prompt_tokens": len(rendered.token_ids), "completion_tokens": len(completion.token_ids)}
    call = RecordedCall(
        model=sampler.pool.model,
        finish_reason=completion.finish_reason,
        usage=vf.Usage(**lengths),
        node=node,
        time=span,
        digest=token_hash(rendered.token_ids, completion.token_ids).digest(),
        start_version=completion.start_version,
        end_version=completion.end_version,
        pictures=pictures_in(rendered),
    )
    trace.calls.append(call)
    if completion.finish_reason == "length":
        trace.stop("max_output_tokens")


def refuse_placeholders(trace: vf.Trace, renderer: Renderer) -> None:
    """Raise TokenMismatch if the last reply of a trace has a token that stands for a picture."""
    placeholders = placeholders_of(renderer)
    if not placeholders:
        return
    node = trace.nodes[-1]
    sampled = itertools.compress(node.token_ids, node.mask)
    written = next((token for token in sampled if token in placeholders), None)
    if written is not None:
        tokenizer = tokenizer_of(renderer)
        name = written if tokenizer is None else repr(tokenizer.decode([written]))
        raise TokenMismatch(f"the model wrote {name}, the place of a picture, where there is none")


def read(
    completion: Completion, renderer: Renderer, rendered: RenderedTokens, tools: list[WireTool] | None = None
) -> vf.AssistantMessage:
    """Parse a completion of a prompt. A call in a reply that its length cut off is merely incomplete, and no fault."""
    cut_off = completion.finish_reason == "length"
    return parse(completion.token_ids, renderer, tools, prompt_ids=rendered.token_ids, cut_off=cut_off)


def parse(
    token_ids: list[int],
    renderer: Renderer,
    tools: list[WireTool] | None = None,
    *,
    prompt_ids: list[int] | None = None,
    cut_off: bool = False,
) -> vf.AssistantMessage:
    """Parse sampled tokens as a message; `prompt_ids` are those before them, which may have opened the reply's thought.

    A tool call that cannot be read has no name, and its arguments are what the model wrote: `Tools.answer` says what is
    wrong. It is left out of a reply that was cut off. Where no `tools` were offered, what looks like a call is text.
    """

    def whole() -> str:
        tokenizer, ends = tokenizer_of(renderer), renderer.get_stop_token_ids()
        words = itertools.takewhile(lambda token: token not in ends, token_ids)
        return "" if tokenizer is None else encodable(tokenizer.decode(list(words)))

    try:
        parsed = renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
    except (ValueError, RecursionError) as error:  # Python's JSON parser: a number too long, nesting too deep
        unread = ParsedToolCall(raw=str(error), status=ToolCallParseStatus.MALFORMED_STRUCTURE)
        parsed = ParsedResponse(content=whole(), tool_calls=[unread])
    attempts = parsed.tool_calls or []
    if not tools and any(call.token_span for call in attempts):
        parsed.content = whole().rpartition("</think>")[2]
        attempts = []
    calls = []
    for index, call in enumerate(attempts):
        name, arguments = call.name, call.arguments
        if call.status not in READABLE or not name or not isinstance(name, str):
            if cut_off or not tools:
                continue
            name, arguments = "", call.raw
        # Text that is not JSON stays as the model wrote it.
        text = encodable(arguments) if isinstance(arguments, str) else json.dumps(arguments or {})
        identity = call.id or call_id(prompt_ids or token_ids, index)
        calls.append(vf.ToolCall(id=identity, name=encodable(name), arguments=text))
    return vf.AssistantMessage(
        content=parsed.content or None, reasoning_content=parsed.reasoning_content, tool_calls=calls or None
    )
