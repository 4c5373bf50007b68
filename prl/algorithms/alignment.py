"""Logprobs of a reference with another tokenizer, compared over the text that both have tokens for.

Each reply is scored in the reference's own terms: the conversation before it in its chat template, the text of the
reply in its tokens and, where the policy ended its turn, the token that ends a turn in its template.

A sequence of tokens has a border behind each token with which the text is complete to a character; within a character,
where both sequences have it in the same tokens, behind each of these. A span lies between two neighbouring borders of
both sequences; the two tokens that end the turn are one as well. With T the sum of the reference's logprobs in a span,
and i those with which the policy sampled its n tokens there, each of the n has i + (T - sum i) / n as its reference:
they add up to T, and each has an equal share of the difference. Source: the aligned chunks of approximate likelihood
matching (arXiv 2503.20083) and of TRL's GOLD trainer.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, cast

from renderers import Renderer
from tokenizers.decoders import DecodeStream
from verifiers.v1.clients.train import tool_to_wire
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import MessageNode

from prl.algorithms.reference import ReferenceLogprobs
from prl.base.errors import ConfigError, EngineError
from prl.base.text import in_one_line
from prl.engines.client import ModelPool
from prl.engines.renderer import render, render_prompt, tokenizer_of
from prl.engines.template import shared_length
from prl.rollouts.inputs import ModelInput
from prl.rollouts.logprobs import is_measured
from prl.rollouts.rollout import Rollout

REPLY = "!"
"""Content of a message that is rendered to find the text which a chat template writes around one."""
Border = tuple[int, int]
"""Complete characters behind a token, and a hash of the names of the tokens since, 0 for none."""
Spelling = tuple[str, list[Border]]
"""The text of a sequence of tokens without an incomplete character at its end, and its borders, one for each token."""
Span = tuple[slice, slice]
"""Tokens of one piece of text: the policy's, and the reference's."""


class AlignedLogprobs(ReferenceLogprobs):
    """A rollout's replies under a model with another tokenizer: `ref_logprobs` of the tokens that train.

    A token without a counterpart has the policy's own logprob, so that nothing pulls it: the end of a turn where the
    reference's template has none, an incomplete character at the end of a reply, and spans in which the sampler did not
    measure every token. Tokens that do not train have 0.0.
    """

    def __init__(self, pool: ModelPool, limit: int, policy: Renderer, reference: Renderer, log: Callable[..., None]):
        """
        Args:
            pool: The reference.
            limit: Samples that are scored at a time.
            policy: The policy's renderer.
            reference: The renderer of the reference's chat template.
            log: Is given the metric `spans_of_one` of each sample, name and value.

        Raises:
            ConfigError: A tokenizer does not say which text each of its tokens is.
            UnrenderablePrompt: The reference's template takes no reply.
        """
        super().__init__(pool, limit)
        self.renderer = reference
        self.log = log
        self.ours = cast(Any, tokenizer_of(policy))
        self.theirs = cast(Any, tokenizer_of(reference))
        if not (hasattr(self.ours, "backend_tokenizer") and hasattr(self.theirs, "backend_tokenizer")):
            raise ConfigError("algo.align=text: both models need a tokenizer.json, to tell the text of each token")
        # Letters that spell a special token are text: with them the policy has not ended its turn.
        self.speller = copy.deepcopy(self.theirs)
        self.speller.split_special_tokens = True
        self.stops = policy.get_stop_token_ids()
        our_opening, _ = around_reply(policy)
        their_opening, written = around_reply(reference)
        ours, theirs = self.ours.decode(our_opening).strip(), self.theirs.decode(their_opening).strip()
        if ours != theirs:
            raise ConfigError(
                f"algo.align=text: the chat template of {pool.model!r} begins replies with {theirs!r}, the policy's "
                f"with {ours!r}: a reply would have another place. Choose two that think, or two that do not"
            )
        self.end, self.before = end_and_before(written, reference.get_stop_token_ids(), self.theirs)

    async def _score(self, rollout: Rollout, index: int, context: list[int]) -> None:
        sample = rollout.samples[index]
        if sample.pictures:
            raise EngineError("algo.align=text compares texts alone, and there are pictures in the conversation")
        nodes = rollout.sample_branches[index].nodes
        values = [value if is_measured(value) else 0.0 for value in sample.logprobs]
        replies: list[tuple[list[int], list[Span]]] = []
        stop = 0
        for place, node in enumerate(nodes):
            stop += len(node.token_ids)
            begin = stop - sum(node.mask)
            if node.sampled and any(sample.mask[begin:stop]):
                replies.append(self.align(nodes[:place], sample.token_ids[begin:stop], begin))
        scored_ids: list[int] = []
        logprobs: list[float] = []
        ones = 0
        async with self._slots:
            # The last reply first: its conversation mostly begins with the earlier ones, so that one prefill scores
            # them all.
            for token_ids, spans in reversed(replies):
                if scored_ids[: len(token_ids)] != token_ids:  # else the later conversation begins with this one
                    scored_ids = token_ids
                    logprobs = await self.pool.prompt_logprobs(ModelInput(token_ids))
                for ours, theirs in spans:
                    if all(map(is_measured, sample.logprobs[ours])):
                        values[ours] = spread(values[ours], math.fsum(logprobs[theirs]))
                    ones += len(values[ours]) == len(logprobs[theirs]) == 1
        sample.ref_logprobs = values
        self.log("spans_of_one", ones / sum(sample.mask))

    def align(self, nodes: list[MessageNode], reply_ids: list[int], begin: int) -> tuple[list[int], list[Span]]:
        """The reference's tokens of a conversation and a reply to it, and the spans of sample and tokens.

        Args:
            nodes: The messages of the conversation.
            reply_ids: The policy's tokens of the reply.
            begin: Where they are in the sample.

        Raises:
            EngineError: The reference's chat template does not take the conversation.
        """
        try:
            messages = [message_to_wire(node.message) for node in nodes]
            tools = [tool_to_wire(tool) for node in nodes[:1] for tool in node.tools]
            prompt = list(self.renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True))
        except Exception as error:  # of a chat template, which is a program
            raise EngineError(f"the template of model {self.pool.model!r}: {in_one_line(error)}") from error
        ended = reply_ids[-1] in self.stops
        ours = spelling(self.ours, reply_ids[:-1] if ended else reply_ids)
        token_ids = [*prompt, *encode(self.speller, ours[0], self.before)]
        spans = spans_of(ours, spelling(self.theirs, token_ids[len(prompt) :]), begin, len(prompt))
        if ended and self.end:
            last = begin + len(reply_ids) - 1
            spans.append((slice(last, last + 1), slice(len(token_ids), len(token_ids) + 1)))
            token_ids += self.end
        return token_ids, spans


def spans_of(ours: Spelling, theirs: Spelling, begin: int = 0, their_begin: int = 0) -> list[Span]:
    """The shortest parts of two sequences with the same text, in order, where the sequences begin at these places.

    Where `theirs` has another text (normalised, or without unknown characters), it has no border but its last behind
    the first difference.
    """
    text, borders = ours
    their_text, their_borders = theirs
    shared = shared_length(text, their_text)
    stops = {border: stop for stop, border in enumerate(their_borders, start=1) if border[0] <= shared}
    # The ends always meet: where the texts differ, the rest of the reply is one span.
    stops[len(text), 0] = len(their_borders)
    spans: list[Span] = []
    start = their_start = 0
    for stop, border in enumerate(borders, start=1):
        their_stop = stops.get(border, 0)
        if their_stop > their_start:
            their_part = slice(their_begin + their_start, their_begin + their_stop)
            spans.append((slice(begin + start, begin + stop), their_part))
            start, their_start = stop, their_stop
    return spans


def spread(own: list[float], total: float) -> list[float]:
    """Return logprobs that add up to `total`, all at one distance from the policy's `own`."""
    share = (total - math.fsum(own)) / len(own)
    # One token takes the reference's value as it is; to subtract and add its own would round it.
    return [value + share for value in own] if len(own) > 1 else [total]


def spelling(tokenizer: Any, token_ids: list[int]) -> Spelling:
    """Decode tokens one by one. Returns their text, and their borders."""
    backend = tokenizer.backend_tokenizer
    stream = DecodeStream(skip_special_tokens=False)
    try:
        pieces = [stream.step(backend, token_id) for token_id in token_ids]
    except Exception:  # of the Rust part: with a byte that is no UTF-8, those before it change their text
        pieces = [None] * (len(token_ids) - 1) + [backend.decode(token_ids, skip_special_tokens=False)]
    borders: list[Border] = []
    complete = incomplete = 0
    for piece, name in zip(pieces, tokenizer.convert_ids_to_tokens(token_ids), strict=True):
        complete += len(piece or "")
        incomplete = hash((incomplete, name)) if piece is None else 0
        borders.append((complete, incomplete))
    return "".join(filter(None, pieces)), borders


def encode(tokenizer: Any, text: str, before: str = "") -> list[int]:
    """The tokens of `text` with `before` in front of it; by itself where the two would share a token."""
    head, whole = (tokenizer.encode(part, add_special_tokens=False) for part in (before, before + text))
    return list(whole[len(head) :]) if whole[: len(head)] == head else encode(tokenizer, text)


def around_reply(renderer: Renderer) -> tuple[list[int], list[int]]:
    """Return what a chat template begins a reply with in the model's stead, such as "<think>", and what it writes of
    `REPLY` and behind it."""
    dialogue = [{"role": "user", "content": "?"}, {"role": "assistant", "content": REPLY}]
    prompt, whole = render_prompt(renderer, dialogue[:1]).token_ids, render(renderer, dialogue).token_ids
    shared = shared_length(prompt, whole)
    return list(prompt[shared:]), list(whole[shared:])


def end_and_before(written: list[int], stops: list[int], tokenizer: Any) -> tuple[list[int], str]:
    """Return the token that ends the turn in what a template writes for `REPLY`, [] for none, and a text that replies
    are encoded behind: some tokenizers put a blank in front of a text that has nothing before it."""
    end = next((place for place, token in enumerate(written) if token in stops), len(written))
    alone = encode(tokenizer, REPLY)
    return written[end : end + 1], "" if written[:end][-len(alone) :] == alone else "\n"
