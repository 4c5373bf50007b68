"""A check that a chat template renders what it was given: the words of each message."""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prl.engines.renderer import UnrenderablePrompt, call_id, render_prompt, tokenizer_of

if TYPE_CHECKING:
    from renderers import Renderer

THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
"""A reply that begins with its thought."""
PROBE = "Words-7e1"
"""A text that stands in for a message's, to see whether it comes out."""
PROBE_NAME = "probe_7e1"
"""A name that stands in for a tool's."""
EXCERPT = 60
"""Characters of a text that a message quotes."""


def parts_of(message: dict[str, Any]) -> list[str]:
    """Return what a chat template should write of a message, in order: thoughts, text, names of the tools called.

    Blanks around a part are the template's own, and so are the marks of the thought that a reply begins with.
    """
    contents = texts_of(message)
    thought = THOUGHT.fullmatch(contents[0]) if contents and message.get("role") == "assistant" else None
    texts = [message.get("reasoning_content") or "", *(thought.groups() if thought else contents[:1]), *contents[1:]]
    calls = [call.get("function", call).get("name") or "" for call in message.get("tool_calls") or []]
    return [part for text in [*texts, *calls] if (part := str(text).strip())]


def texts_of(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return [str(part.get("text", "")) for part in content if isinstance(part, dict)]
    return [str(content)]


def first_lost(tokenizer: Any, token_ids: Sequence[int], message: dict[str, Any]) -> str | None:
    """Return the first part of a message that is not among the tokens, in the order of its parts; None if all are.

    A part counts as it is, or as the tokenizer itself returns it: some change blanks or the spelling of letters.
    """
    text, place = tokenizer.decode(list(token_ids)), 0
    for part in parts_of(message):
        spelt = tokenizer.decode(tokenizer.encode(part, add_special_tokens=False)).strip()
        places = [(start, each) for each in (part, spelt) if (start := text.find(each, place)) >= 0]
        if not places:
            return part
        start, probe = places[0]
        place = start + len(probe)
    return None


@dataclass(frozen=True)
class Loss:
    """Something that a prompt has not in its tokens as it was asked for."""

    what: str
    """A sentence about it."""
    left_out: bool
    """Nothing of it came out; else the template may read it its own way, as commands to it in a system message."""


def losses_of_prompt(
    renderer: "Renderer", messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, first: int = 0
) -> Iterator[Loss]:
    """Yield what a prompt lost when it was rendered, of the messages from `first` on. Raises UnrenderablePrompt.

    A message was left out if another text in its place does not come out either.
    """
    tokenizer = tokenizer_of(renderer)
    rendered = list(render_prompt(renderer, messages, tools).token_ids)
    if tokenizer is None:  # of a renderer of the user's own
        return

    def text_of(conversation: list[dict[str, Any]], its_tools: list[dict[str, Any]] | None = tools) -> str:
        return str(tokenizer.decode(list(render_prompt(renderer, conversation, its_tools).token_ids)))

    for tool in tools or []:
        probe = {**tool, "function": {**tool["function"], "name": PROBE_NAME}}
        if PROBE_NAME not in text_of(messages, [probe if each is tool else each for each in tools or []]):
            yield Loss(f"the chat template leaves out the tool {tool['function']['name']!r}", left_out=True)
    for number, message in list(enumerate(messages))[first:]:
        excerpt = " ".join(parts_of(message))[:EXCERPT]
        what = f"message {number + 1}, the {message.get('role')}'s {excerpt!r}"
        probe, words = probe_of(message)
        shown = True
        with contextlib.suppress(UnrenderablePrompt):  # a template that wants certain words shows them
            text = text_of([*messages[:number], probe, *messages[number + 1 :]])
            shown = all(each in text for each in words)
        if not shown:
            yield Loss(f"the chat template leaves out {what}", left_out=not message.get("tool_calls"))
        elif message.get("role") != "tool" and first_lost(tokenizer, rendered, without_thought(message)) is not None:
            yield Loss(f"the chat template changes {what}", left_out=False)  # a tool's may be written as JSON


def probe_of(message: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a message with other words in place of its own, and these words.

    A text has two lines, which are none where the template writes a list of parts as Python would.
    """
    probe, words = dict(message), []
    if "".join(texts_of(message)).strip():
        text = PROBE if message.get("role") == "tool" else f"{PROBE}\n{PROBE}"  # templates write a tool's as JSON
        probe["content"] = [{"type": "text", "text": text}] if isinstance(message["content"], list) else text
        words.append(text)
    if message.get("tool_calls"):
        probe["tool_calls"] = []
        for number, call in enumerate(message["tool_calls"]):
            name, value = f"{PROBE_NAME}_{number}", f"{PROBE}-{number}"
            function = {"name": name, "arguments": json.dumps({"value": value})}
            probe["tool_calls"].append({**call, "function": function})
            words += [name, value]
    return probe, words


def calls_and_answers(tool: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the messages of a model that calls a tool so many times in a reply, with a run's ids, and of the tool."""
    function = {"name": tool["function"]["name"], "arguments": "{}"}
    calls = [{"id": call_id((), number), "type": "function", "function": function} for number in range(count)]
    answers = [{"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": "1"} for call in calls]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *answers]


def without_thought(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a prompt without its thought: many templates drop those of earlier replies on purpose."""
    if message.get("role") != "assistant" or not isinstance(message.get("content"), str):
        return message
    return {**message, "reasoning_content": None, "content": message["content"].rpartition("</think>")[2]}
