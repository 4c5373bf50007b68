"""The layouts of rows that `env=jsonl` knows by their keys: which is the prompt, which the reply to imitate.

Of `LAYOUTS` the first counts of which a row has a value at both keys. In a conversation an assistant's message is the
reply, and those before it are the prompt. Messages may be in OpenAI's format, verifiers' or ShareGPT's, or JSON text.
"""

import contextlib
import json
import re
from typing import Any

import verifiers.v1 as vf
from pydantic import TypeAdapter

from prl.base.errors import UNREADABLE
from prl.rollouts.images import HOLDERS, PARTS, url_of

LAYOUTS: tuple[tuple[str, str, str | None], ...] = (
    # the key of the prompt, one that stands beside it, and that of the reply: the prompt's own in a conversation
    ("prompt", "completion", "completion"),
    ("prompt", "chosen", "chosen"),
    ("prompt", "answer", None),
    ("prompt", "reward_model", None),
    ("messages", "completion", "completion"),
    ("messages", "messages", "messages"),
    ("conversations", "conversations", "conversations"),
    ("chosen", "chosen", "chosen"),
    ("instruction", "output", "output"),
    ("question", "answer", "answer"),
    ("problem", "solution", "solution"),
    *((key, key, None) for key in ("prompt", "question", "problem", "instruction")),
)
ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
"""Keys of an answer, of which the first counts."""
ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool", "developer": "system"}
"""Names of roles that verifiers has under another one."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's thought."""
CHAT = re.compile(r"""\s*\[\s*\{\s*(["'])(?:role|content|from|value)\1\s*:""")
"""Beginning of a list of chat messages as JSON, or with ' as Python writes it, and pandas into CSV."""
SYSTEMS = ("system", "system_prompt")
"""Keys of a system message that stands beside the prompt, of which the first counts."""
UNREAD = {
    "history": "write the turns as `messages`",
    "context": "write it into the prompt",
    "functions": "write them as `tools`",
}
"""Keys of what belongs to a prompt and is not read, and what to do."""
IS_GOOD = ("label", "kto_tag")
"""Keys of whether a reply is a good one, in data for KTO."""
FALSE = (0, "0", "false", "False", "FALSE")
"""Values by which a file says no: JSON's `false` is a zero, and a column of a CSV file has texts alone."""
MARKED = "the next picture of the row"
"""In place of the URL of a picture that stands in the row's own column."""
MESSAGES = TypeAdapter(vf.Messages)


class UntrainedMessage(vf.AssistantMessage):
    """A message of the assistant's that is part of a conversation, and no reply to imitate."""


def layout_of(row: dict[str, Any]) -> tuple[str, str | None] | None:
    """Return the keys of a row's prompt and of its reply, the same for a conversation; None if no layout fits."""
    for prompt, other, reply in LAYOUTS:
        if row.get(prompt) is not None and row.get(other) is not None:
            return prompt, reply
    return None


def decoded(value: Any, *, whole: bool) -> Any:
    """Return a text that is a list in JSON as that list: a column of a CSV file has texts alone.

    It has to be one of chat messages, where a text might be meant; with `whole` of anything. Raises ValueError for
    messages as Python writes them.
    """
    chat = CHAT.match(value) if isinstance(value, str) else None
    if chat and chat[1] == "'":
        raise ValueError(f"messages as text must be JSON (json.dumps writes it), got {value!r:.80}")
    if isinstance(value, str) and (whole or chat):
        with contextlib.suppress(*UNREADABLE):
            return json.loads(value)
    return value


def divided(prompt: str | list[Any], reply: str | list[Any] | None, *, every: bool) -> tuple[list[Any], list[Any]]:
    """Return the prompts in a conversation, each with the assistant's message that follows it, and what is behind.

    In place of a message that is not to be imitated there is none.

    Args:
        prompt: A text, or messages; those of the whole conversation if `reply` is None.
        reply: What follows, likewise; messages that do not begin with the assistant's are the whole conversation.
        every: Take every message of the assistant's that is not the first message, else the last one alone.
    """
    opening = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
    replies = [vf.AssistantMessage(content=reply)] if isinstance(reply, str) else reply or []
    if replies and replies[0].role in ("system", "user"):
        opening, replies = replies, []
    messages, first = [*opening, *replies], len(opening) if replies else 1
    places = [place for place, message in enumerate(messages) if place >= first and message.role == "assistant"]
    untrained = [isinstance(messages[place], UntrainedMessage) for place in places]
    pairs = [
        (messages[:place], [] if skipped else [messages[place]])
        for place, skipped in zip(places, untrained, strict=True)
    ]
    return pairs if every else pairs[-1:], messages[places[-1] + 1 :] if places else []


def messages_of(value: list[Any]) -> list[Any]:
    """Return the messages of a conversation; raise AttributeError, KeyError, TypeError or ValueError if it is none.

    Calls of tools and their results get ids, in their order, where they have none. A message of the assistant's with
    `weight` 0 (OpenAI) or `train` false is an `UntrainedMessage`.
    """
    messages = [as_verifiers(message) for message in value]
    calls = [call for message in messages for call in message["tool_calls"] or ()]
    results = [message for message in messages if message["role"] == "tool"]
    if not any(each.get("id") for each in calls) and not any(each.get("tool_call_id") for each in results):
        for key, entries in (("id", calls), ("tool_call_id", results)):
            for number, entry in enumerate(entries):
                entry[key] = f"call{number:05d}"  # nine letters and digits, as some templates want
    says_no = [message.get("weight") in FALSE or message.get("train") in FALSE for message in messages]
    return [
        UntrainedMessage(**dict(read)) if untrained and read.role == "assistant" else read
        for read, untrained in zip(MESSAGES.validate_python(messages), says_no, strict=True)
    ]


def as_verifiers(message: Any) -> dict[str, Any]:
    """Return a chat message as verifiers has it: OpenAI's format nests tool calls, ShareGPT's has other keys."""
    role = message.get("role") or message.get("from")
    content = message.get("content", message.get("value"))
    if message.get("function_call"):
        raise ValueError("function_call: write it as tool_calls, which have taken its place")
    calls = [json.loads(content)] if role == "function_call" else message.get("tool_calls") or []
    calls = [call | (call.get("function") or {}) for call in calls]
    thought = next((message[key] for key in THOUGHTS if message.get(key)), None)
    return message | {
        "role": "assistant" if role == "function_call" else ROLES.get(role, role),
        "content": None if role == "function_call" else content_of(content),
        "tool_calls": [call | {"arguments": arguments_of(call)} for call in calls] or None,
        "reasoning_content": thought,
    }


def arguments_of(call: dict[str, Any]) -> str:
    """Return the arguments of a tool call as text; raise ValueError if they are no JSON object."""
    arguments = call.get("arguments") or "{}"  # a tool without parameters may have none
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(json.loads(text), dict):
        raise ValueError(f"the arguments of a tool call must be a JSON object, got {text:.80}")
    return text


def content_of(content: Any) -> Any:
    """Return a message's content: its text parts as one text, and with pictures a list of parts.

    Raises ValueError for another kind of part.
    """
    if not isinstance(content, list):
        return content
    if any(part.get("type") not in ("text", *PARTS) for part in content):
        raise ValueError(
            f"a part of a message's content must be {{type: text, text: <text>}} or a picture, got {content!r:.200}"
        )
    if all(part["type"] == "text" for part in content):
        return "".join(part["text"] for part in content)
    return [part if part["type"] == "text" else picture_of(part) for part in content]


def picture_of(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part that is a picture as verifiers has it; one without a picture of its own is `MARKED`."""
    is_mark = not any(part.get(key) for key in HOLDERS)
    return {"type": "image_url", "image_url": {"url": MARKED if is_mark else url_of(part)}}


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Return the tools that a row declares in OpenAI's format, whose outer mapping they may lack."""
    declared = [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
    if not all(isinstance(tool["function"].get("name"), str) for tool in declared):
        raise ValueError("each needs a name")
    return declared
