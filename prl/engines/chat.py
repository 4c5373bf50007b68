"""Sources of rollouts that answer with messages rather than tokens: a chat endpoint, or the tasks' own demonstrations.

The policy's renderer turns a message into the tokens that the policy would have sampled to write it.
"""

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verifiers.v1.dialects.chat import message_to_wire

from prl.base.errors import ConfigError, EngineError
from prl.engines.renderer import UnrenderablePrompt, call_id, render, render_prompt, tokenizer_of
from prl.engines.replies import Completion, reading
from prl.engines.template_check import EXCERPT, first_lost
from prl.rollouts.images import is_picture

if TYPE_CHECKING:
    from renderers import Renderer

    from prl.engines.frozen import FrozenPool

OF_TOKENS = ("stop_token_ids", "skip_special_tokens")
"""Sampling parameters that mean something to a server which exchanges token ids, and to no other."""
ENDED = {"stop": "stop", "tool_calls": "stop", "function_call": "stop", "length": "length", None: None}
"""The `finish_reason` of a chat endpoint -> the one of prl's servers."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A prompt as messages."""

    given: Sequence[Any]
    """verifiers' messages, or mappings in OpenAI's format."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the model may call, in OpenAI's format."""
    task: Any = None
    """The data of the task that is played."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages in OpenAI's format."""
        return [each if isinstance(each, dict) else message_to_wire(each) for each in self.given]


@dataclass(frozen=True, slots=True)
class Answer:
    """An assistant message; `finish_reason` is stop, length or null."""

    message: dict[str, Any]
    finish_reason: str | None = "stop"
    may_be_cut: bool = True
    """The beginning of the reply will do where all of it does not fit."""


class UnusableReply(EngineError):
    """A source has no reply here that the policy could have given."""

    kind = "env"


class MessageSource(ABC):
    """A frozen source of rollouts that takes a dialogue and gives messages."""

    version = None
    cache_salt = None
    model: str
    """Its name, for the trace."""

    @abstractmethod
    async def answer(self, dialogue: Dialogue, sampling: dict[str, Any], *, n: int) -> list[Answer]:
        """Return `n` answers; `sampling` is as in `prl.engines.protocol`. Raises EngineError where there is none."""


class ChatSource(MessageSource):
    """A model behind `/v1/chat/completions`, of any tokenizer."""

    def __init__(self, pool: "FrozenPool"):
        self.pool = pool
        self.model = pool.model

    async def answer(self, dialogue: Dialogue, sampling: dict[str, Any], *, n: int) -> list[Answer]:
        asked: dict[str, Any] = {"top_p": 1.0} | {k: v for k, v in sampling.items() if k not in OF_TOKENS}
        # What a model thought earlier is its own: endpoints refuse or ignore it.
        asked["messages"] = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in dialogue.messages]
        if dialogue.tools:
            asked["tools"] = dialogue.tools
        # One request each: not every endpoint knows `n`.
        requests = (self._one(asked | {"seed": (sampling["seed"] + number) % 2**31}) for number in range(n))
        return list(await asyncio.gather(*requests))

    async def _one(self, asked: dict[str, Any]) -> Answer:
        def read(reply: dict[str, Any]) -> Answer:
            choice = reply["choices"][0]
            reply_message = choice["message"]
            reason = choice.get("finish_reason")
            if reason not in ENDED:
                raise EngineError(f"model {self.model!r} gave no whole reply: it ended with {reason!r}")
            message = {"role": "assistant", "content": reply_message.get("content") or ""}
            if thought := reply_message.get("reasoning_content") or reply_message.get("reasoning"):
                message["reasoning_content"] = thought
            if reply_message.get("tool_calls"):
                message["tool_calls"] = reply_message["tool_calls"]
            return Answer(message, ENDED[reason])

        return await self.pool.chat(asked, read)


class Demonstrations(MessageSource):
    """Plays each task's own demonstration: the n-th reply of a conversation is its n-th assistant message."""

    model = "demonstrations"

    def __init__(self, key: str):
        """`key` names the task's field."""
        self.key = key

    async def answer(self, dialogue: Dialogue, sampling: dict[str, Any], *, n: int) -> list[Answer]:
        with reading(self.model):
            replies = replies_in(dialogue.task, self.key)
            opening = dialogue.task.prompt
            shown = [] if opening is None or isinstance(opening, str) else opening
            # The prompt may have replies of its own, which are none of the demonstration's.
            given = _spoken(dialogue.messages) - _spoken(Dialogue(shown).messages)
        if given >= len(replies):
            raise UnusableReply(
                f"the env asks for reply {given + 1}, and the task's {self.key} has {len(replies)} (a list of messages)"
            )
        # Half a demonstration would teach to stop in the middle.
        return [Answer(replies[given], may_be_cut=False)] * n


def _spoken(messages: list[dict[str, Any]]) -> int:
    return sum(message.get("role") == "assistant" for message in messages)


def replies_in(task: Any, key: str) -> list[dict[str, Any]]:
    """Return the assistant messages of a task's demonstration, its field `key`. Raises as `replies_of` does."""
    return replies_of(getattr(task, key, None), key)


def replies_of(value: Any, key: str) -> list[dict[str, Any]]:
    """Return the assistant messages of a demonstration: of a list of messages, else the text itself.

    Raises ValueError, with the demonstration's `key`, if it is neither.
    """
    if isinstance(value, list | tuple):
        with contextlib.suppress(AttributeError, KeyError):  # of what is no message
            whole = [message for message in Dialogue(value).messages if _spoken([message])]
            replies = [message | {"content": message.get("content") or ""} for message in whole]
            if replies:
                return replies
    elif value is not None and not isinstance(value, dict) and str(value):
        return [{"role": "assistant", "content": str(value)}]
    raise ValueError(f"{key} holds no reply (a text, or a list of messages with an assistant's among them)")


def words_of(messages: Sequence[dict[str, Any]], picture: str | None = None) -> str:
    """Return messages as one text: what they say and the calls that they make; of several roles, who says it.

    `picture` stands for one. Raises ValueError for a part that is no text, such as a picture where nothing stands for
    it.
    """
    roles = [message["role"] for message in messages]
    texts = []
    for message, role in zip(messages, roles, strict=True):
        content = message.get("content") or ""
        is_text = isinstance(content, str)
        parts = [] if is_text else [part if isinstance(part, dict) else {} for part in content]
        lines = [content] if is_text else [picture if is_picture(part) else part.get("text") for part in parts]
        if None in lines:
            raise ValueError(f"a message of the {role} has a part that is no text")
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        text = "\n".join([*filter(None, lines), *(json.dumps(call, ensure_ascii=False) for call in calls)])
        texts.append(text if len(set(roles)) == 1 else f"{role}: {text}")
    return "\n\n".join(texts)


def as_completion(renderer: "Renderer", dialogue: Dialogue, answer: Answer, max_tokens: int) -> Completion:
    """Return the policy's tokens of an answer, its end-of-turn token included unless its length cut it off.

    Raises UnusableReply if there is no room for all of them, the template does not fit or leaves a part of it out.
    """
    tools, messages = dialogue.tools, dialogue.messages
    prompt = list(render_prompt(renderer, messages, tools).token_ids)
    whole = list(render(renderer, [*messages, with_call_ids(answer.message, prompt)], tools).token_ids)
    stops, reply = set(renderer.get_stop_token_ids()), whole[len(prompt) :]
    end = next((place for place, token in enumerate(reply, start=1) if token in stops), None)
    if whole[: len(prompt)] != prompt or end is None:
        problem = "does not begin with the prompt" if end is not None else "has no end-of-turn token"
        raise UnusableReply(f"the policy's chat template takes no reply from elsewhere: with one, it {problem}")
    tokenizer = tokenizer_of(renderer)
    lost = None if tokenizer is None else first_lost(tokenizer, reply[: end - 1], answer.message)
    if lost is not None:
        raise UnusableReply(
            f"the policy's chat template would leave out {lost[:EXCERPT]!r} of a reply: it strips thoughts, or the "
            "text has a token that ends a turn"
        )
    # A reply that was cut off has not ended its turn: the end token would teach that it had.
    token_ids = reply[: end - (answer.finish_reason == "length")]
    if len(token_ids) <= max_tokens:
        return Completion(token_ids, [], answer.finish_reason)
    if not answer.may_be_cut:
        raise UnusableReply(
            f"a demonstration has {len(token_ids)} tokens, where {max_tokens} fit (model.max_model_len, "
            "sampling.max_tokens)"
        )
    return Completion(token_ids[:max_tokens], [], "length")


def with_call_ids(message: dict[str, Any], prompt_ids: list[int]) -> dict[str, Any]:
    """Return a message whose tool calls have the ids that they get once it is read; those of Kimi's form stay."""
    calls = [dict(call) for call in message.get("tool_calls") or []]
    for number, call in enumerate(calls):
        if not str(call.get("id")).startswith(f"functions.{call.get('function', call).get('name')}:"):
            call["id"] = call_id(prompt_ids, number)
    return message | {"tool_calls": calls} if calls else message


def check_template(renderer: "Renderer", where: str) -> None:
    """Raise ConfigError, with the key `where`, if a renderer has no way to render replies that come as messages."""
    try:
        probe = Answer({"role": "assistant", "content": "!"})
        as_completion(renderer, Dialogue([{"role": "user", "content": "?"}]), probe, max_tokens=1 << 30)
    except (UnusableReply, UnrenderablePrompt) as error:
        raise ConfigError(f"{where}: {error}; choose another renderer") from error
