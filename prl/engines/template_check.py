"""Whether what was asked to be rendered came out: the words of each message."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prl.engines.renderer import UnrenderablePrompt, render_prompt, tokenizer_of

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


def left_out(
    renderer: "Renderer", messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> Iterator[str]:
    """Yield what is not in a prompt as it is rendered: a tool, or a message. Raises UnrenderablePrompt.

    A message was left out if another text in its place does not come out either: its own may be a command to the
    template. Nothing is known of a renderer that keeps no tokenizer, and of messages that call tools.
    """
    tokenizer = tokenizer_of(renderer)
    if tokenizer is None:
        return

    def text_of(conversation: list[dict[str, Any]], its_tools: list[dict[str, Any]] | None = tools) -> str:
        return str(tokenizer.decode(list(render_prompt(renderer, conversation, its_tools).token_ids)))

    for tool in tools or []:
        probe = {**tool, "function": {**tool["function"], "name": PROBE_NAME}}
        if PROBE_NAME not in text_of(messages, [probe if each is tool else each for each in tools or []]):
            yield f"the tool {tool['function']['name']!r}"
    for number, message in enumerate(messages):
        if message.get("tool_calls") or not "".join(texts_of(message)).strip():
            continue
        # Two lines are none where a template writes a list of parts as Python would; a tool's may be written as JSON.
        words = PROBE if message.get("role") == "tool" else f"{PROBE}\n{PROBE}"
        content = [{"type": "text", "text": words}] if isinstance(message["content"], list) else words
        probed = [*messages[:number], {**message, "content": content}, *messages[number + 1 :]]
        with contextlib.suppress(UnrenderablePrompt):  # a template that wants certain words shows them
            if words not in text_of(probed):
                excerpt = " ".join(parts_of(message))[:EXCERPT]
                yield f"message {number + 1}, the {message.get('role')}'s {excerpt!r}"
