"""Whether what was asked to be rendered came out: the words of each message, and nothing that a tokenizer obeys."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prl.inference.renderer import UnrenderablePrompt, render_prompt, tokenizer_of

if TYPE_CHECKING:
    from renderers import Renderer

THOUGHT_MARKS = re.compile(r"</?think>")
EXCERPT = 60
"""Characters of a text that a message quotes."""


def parts_of(message: dict[str, Any]) -> list[str]:
    """Return what a chat template should write of a message, in order: thoughts, text, names of the tools called.

    Blanks around a part are the template's own, and so are the marks of a thought.
    """
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    texts = [message.get("reasoning_content") or "", *THOUGHT_MARKS.split(str(content))]
    calls = [call.get("function", call).get("name") or "" for call in message.get("tool_calls") or []]
    return [part for text in [*texts, *calls] if (part := str(text).strip())]


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
        start, found = places[0]
        place = start + len(found)
    return None


def marks_of(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern of the control tokens that the tokenizer reads in any text, without the marks of thoughts."""
    added = tokenizer.added_tokens_decoder.values()
    marks = [token.content for token in added if token.special and not THOUGHT_MARKS.fullmatch(token.content)]
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")


@dataclass(frozen=True)
class Loss:
    """Something that a prompt has not in its tokens as it was asked for."""

    what: str
    """A sentence about it."""
    left_out: bool
    """Nothing of it came out; else the template may read it its own way, as commands to it in a system message."""


def losses_of_prompt(
    renderer: "Renderer", messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> Iterator[Loss]:
    """Yield what a prompt lost when it was rendered. Raises UnrenderablePrompt.

    A message that makes no difference to the tokens was left out. Of each role, the first one is tried.
    """
    tokenizer, rendered = tokenizer_of(renderer), list(render_prompt(renderer, messages, tools).token_ids)
    if tokenizer is None:  # of a renderer of the user's own
        return
    text, roles = tokenizer.decode(rendered), [message.get("role") for message in messages]
    for tool in tools or []:
        name = tool.get("function", tool)["name"]
        if name not in text:
            yield Loss(f"the chat template leaves out the tool {name!r}", left_out=True)
    for role in dict.fromkeys(roles):
        number = roles.index(role)
        what = f"message {number + 1}, the {role}'s {excerpt(messages[number])!r}"
        if parts_of(messages[number]) and rendered == without(renderer, messages, number, tools):
            yield Loss(f"the chat template leaves out {what}", left_out=True)
        elif first_lost(tokenizer, rendered, without_thought(messages[number])) is not None:
            yield Loss(f"the chat template changes {what}", left_out=False)


def without(
    renderer: "Renderer", messages: list[dict[str, Any]], number: int, tools: list[dict[str, Any]] | None
) -> list[int] | None:
    """Return the tokens of a prompt without one of its messages; None where the template wants it."""
    others = [*messages[:number], *messages[number + 1 :]]
    with contextlib.suppress(UnrenderablePrompt):
        return list(render_prompt(renderer, others, tools).token_ids)
    return None


def excerpt(message: dict[str, Any]) -> str:
    """Return the beginning of what a message says, for a reader."""
    return " ".join(parts_of(message))[:EXCERPT]


def without_thought(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a prompt without its thought: many templates drop those of earlier replies on purpose."""
    if message.get("role") != "assistant" or not isinstance(message.get("content"), str):
        return message
    return {**message, "reasoning_content": None, "content": message["content"].rpartition("</think>")[2]}
