"""The renderer over a model's own chat template, for models that have no renderer of their family.

The `renderers` package has one, which this extends: it renders a conversation whole, knows every token that ends a
turn, and reads a reply whose thought was opened by the prompt, with all special tokens in it but the turn's end.
"""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from renderers.base import ParsedResponse, RenderedTokens, Renderer, extract_message_tool_names
from renderers.configs import CustomRendererConfig, DefaultRendererConfig
from renderers.default import DefaultRenderer

from prl.config.model_folder import file_of
from prl.engines.renderer import call_id
from prl.engines.tokenizers import Remembering

THOUGHT = "<think>"
"""Beginning of a thought."""
ENDS_IN_THOUGHT = 16
"""Tokens at the end of a prompt that may spell `<think>` and the blanks behind it."""
PROBE = "Reply-7e1"
"""A reply whose place in a rendered text can be found."""
ENDS_IN = ("generation_config.json", "config.json")
"""The files of a model that name its end tokens; the first that names any counts."""


class WithoutSpecials(Remembering):
    """A tokenizer that names no special tokens, and encodes each short text once; the rest is as it was.

    The package's renderer removes special tokens from replies, and a model may have been taught some as marks, such as
    `<answer>`. Not needed once the package removes the end of a turn alone.
    """

    all_special_tokens = ()


class TemplateRenderer(DefaultRenderer):
    """Renders with the tokenizer's chat template, and parses thoughts and end tokens as the template writes them."""

    config_class = DefaultRendererConfig
    """Class of the config with which the package makes a renderer that it imports by its path."""

    def __init__(self, tokenizer: Any, config: DefaultRendererConfig):
        super().__init__(WithoutSpecials(tokenizer), config)
        self.tokenizer = tokenizer
        ends = [*super().get_stop_token_ids(), *self._ends_of_template(), *declared_ends(tokenizer)]
        self._ends = list(dict.fromkeys(ends))
        self._check_reading()

    def get_stop_token_ids(self) -> list[int]:
        return list(self._ends)

    def importable_config(self) -> CustomRendererConfig:
        """Return the config from which the package makes this renderer elsewhere, as verifiers' client does."""
        path = f"{__name__}.{type(self).__name__}"
        return CustomRendererConfig(import_path=path, **self.config.model_dump(exclude_unset=True, exclude={"name"}))

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Return the tokens of the whole conversation, each with the message that it belongs to.

        The template sees all messages at once: some refuse a system message alone, or roles that do not alternate.
        Tokens that are the same without the messages behind are those of the messages before; where the template
        refuses a beginning of the conversation, its tokens count for the next message.
        """
        whole = self._apply(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        owners = [-1] * len(whole)
        start = 0
        for index in range(len(messages)):
            with contextlib.suppress(Exception):  # whatever a template raises of a beginning alone
                beginning = self._apply(messages[: index + 1], tools=tools)
                end = max(start, shared_length(beginning, whole))
                owners[start:end] = [index] * (end - start)
                start = end
        return RenderedTokens(
            token_ids=whole,
            message_indices=owners,
            message_roles=[message.get("role") or "" for message in messages],
            message_tool_names=extract_message_tool_names(messages),
        )

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Parse a reply; where `prompt_ids` ends in an open thought, the reply goes on with it.

        The package finds such a thought behind the header of ChatML alone.
        """
        end_of_prompt = self.tokenizer.decode(list(prompt_ids or [])[-ENDS_IN_THOUGHT:])
        if end_of_prompt.rstrip().endswith(THOUGHT):
            token_ids = [*self.tokenizer.encode(THOUGHT, add_special_tokens=False), *token_ids]
        parsed = super().parse_response(token_ids, tools=tools)
        for number, call in enumerate(parsed.tool_calls):
            call.id = call_id(prompt_ids or token_ids, number)
        if parsed.reasoning_content is not None:  # the lines between are the template's, which writes them again
            parsed.content = parsed.content.lstrip("\n")
        return parsed

    def _check_reading(self) -> None:
        """Raise ValueError where a reply as the template writes it is read as another, such as one with channels."""
        dialogue = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        try:
            prompt, whole = self.render_ids(dialogue[:1], add_generation_prompt=True), self.render_ids(dialogue)
        except Exception:  # the template may want another dialogue
            return
        read = self.parse_response(whole[len(prompt) :], prompt_ids=prompt).content
        before, probe, _ = read.partition(PROBE)
        if whole[: len(prompt)] == prompt and (before.strip() or not probe):
            raise ValueError(
                f"its chat template writes a reply of {PROBE!r} so that it is read as {read!r}: choose the renderer of "
                "the model's family, or mend the template's generation prompt"
            )

    def _ends_of_template(self) -> list[int]:
        """Return the id of the token that the template writes behind a reply; of the next message's mark, if none."""
        dialogue = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        for messages in (dialogue, [*dialogue, {"role": "user", "content": "?"}]):
            with contextlib.suppress(Exception):  # a template may refuse it
                text = self.tokenizer.decode(self.render_ids(messages))
                behind = self.tokenizer.encode(text.rpartition(PROBE)[2].lstrip(), add_special_tokens=False)
                if behind and PROBE in text:
                    return behind[:1] if is_added(self.tokenizer, behind[0]) else []
        return []


class MoreEnds:
    """A renderer of a model that ends turns with further tokens than the renderer knows; the rest is as it was.

    A reply is parsed without such a token. A turn that ends with one is not bridged: the next prompt is rendered.
    """

    def __init__(self, renderer: Renderer, ends: list[int]):
        self._renderer = renderer
        self._ends = ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def get_stop_token_ids(self) -> list[int]:
        return [*self._renderer.get_stop_token_ids(), *self._ends]

    def parse_response(self, token_ids: list[int], **options: Any) -> ParsedResponse:
        end = next((place for place, token in enumerate(token_ids) if token in self._ends), len(token_ids))
        return self._renderer.parse_response(token_ids[:end], **options)

    def bridge_to_next_turn(
        self, prompt_ids: list[int], completion_ids: list[int], messages: list[Any], **options: Any
    ) -> RenderedTokens | None:
        if completion_ids and completion_ids[-1] in self._ends:
            return None
        return self._renderer.bridge_to_next_turn(prompt_ids, completion_ids, messages, **options)


def with_declared_ends(renderer: Renderer, tokenizer: Any) -> Renderer:
    """Return the renderer, or one that also ends turns with the tokens that the model's files name."""
    known = set(renderer.get_stop_token_ids())
    more = [token for token in declared_ends(tokenizer) if token not in known]
    return MoreEnds(renderer, more) if more else renderer


def declared_ends(tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that the model's files name as its ends.

    An id that is no added token of the tokenizer is left out: configs carry the defaults of their class, under which
    another tokenizer has a piece of text.
    """
    for name in ENDS_IN if tokenizer.name_or_path else ():
        file = file_of(tokenizer.name_or_path, name)
        if file is not None:
            content = json.loads(file.read_bytes())
            named = content.get("eos_token_id") if isinstance(content, dict) else None
            if named is not None:
                return [each for each in (named if isinstance(named, list) else [named]) if is_added(tokenizer, each)]
    return []


def is_added(tokenizer: Any, token_id: Any) -> bool:
    """Return whether an id is that of a token which was added to the vocabulary, as control tokens are."""
    return token_id in tokenizer.added_tokens_decoder


def shared_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the number of tokens or characters that two sequences have in common from their beginning."""
    differ = (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differ, min(len(left), len(right)))
