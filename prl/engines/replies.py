"""Reading what servers reply: sampled tokens with their logprobs, and the logprobs of a prompt."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prl.base.errors import EngineError
from prl.rollouts.logprobs import is_measured

ROUNDING = 1e-3
"""A logprob may be that much above 0."""


@dataclass(slots=True)
class Completion:
    """One sampled continuation: `token_ids` and `logprobs` are parallel; `finish_reason` is stop, length or null.

    All tokens were sampled under policy versions from `start_version` to `end_version`; None of a frozen model.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    start_version: int | None = None
    end_version: int | None = None


@dataclass(slots=True)
class Scored:
    """A prompt under a model: the logprob of each token `[tokens]`, the first one's 0.0, and where they were asked for
    the most likely tokens in its place and their logprobs `[tokens, k]`, none for the first."""

    own: list[float]
    ids: list[list[int]]
    logprobs: list[list[float]]


WHOLE = ("stop", "length", None)
"""Reasons of the end of a reply that nothing broke off."""


@contextlib.contextmanager
def reading(whose: str) -> Iterator[None]:
    """Turn what is wrong with a reply, its shape included, into an EngineError that begins with `whose` reply it is."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{whose} sent no usable reply: {error}", error.status) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"{whose} sent a reply that cannot be read: {repr(error)[:200]}") from error


def choices_of(reply: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """The `n` choices of a reply, in order."""
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    if len(choices) != n:
        raise EngineError(f"asked for {n} completions, got {len(choices)}")
    return choices


def own_logprobs(rows: Any, token_ids: list[int]) -> list[Any]:
    """The logprob of each token of a prompt `[tokens]` by its id, from a server's rows of {token id: {logprob}}.

    None where there is none.
    """
    if not isinstance(rows, list):
        return []
    values = []
    for token_id, row in zip(token_ids, rows, strict=False):
        entry = (row or {}).get(str(token_id))
        values.append(entry.get("logprob") if isinstance(entry, dict) else None)
    return values + [None] * (len(rows) - len(values))


def read_prompt_logprobs(values: Any, token_ids: list[int]) -> list[float]:
    """The logprob of each token of a prompt `[tokens]`, the first one's 0.0, from what a server has for each.

    Raises EngineError where one is missing, not finite or above 0.
    """
    if not isinstance(values, list) or len(values) != len(token_ids):
        raise EngineError(f"a prompt of {len(token_ids)} tokens came with {len(values or [])} logprobs")
    logprobs = [0.0]
    for position, (token_id, value) in enumerate(zip(token_ids[1:], values[1:], strict=True), start=1):
        if not isinstance(value, int | float) or not is_measured(value):
            raise EngineError(f"no logprob for token {token_id} at position {position} (got {value!r})")
        if value > ROUNDING:
            raise EngineError(f"token {token_id} at position {position} came with the logprob {value!r}")
        logprobs.append(float(value))
    return logprobs


def read_scored(reply: dict[str, Any], token_ids: list[int], top_k: int) -> Scored:
    """Return what a reply of prl's server says of a prompt and of the `top_k` most likely tokens in each place.

    Raises what `read_prompt_logprobs` and `read_top` raise.
    """
    own = read_prompt_logprobs(reply.get("prompt_logprobs"), token_ids)
    if not top_k:
        return Scored(own, [], [])
    return Scored(own, *read_top(reply.get("prompt_top"), len(token_ids), top_k))


def read_top(rows: Any, tokens: int, top_k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and logprobs of the `top_k` most likely tokens in each place of a prompt, from pairs of these for each token.

    Raises EngineError where there are too few, or they are no logprobs of a distribution.
    """
    if len(rows or ()) != tokens:
        raise EngineError(f"a prompt of {tokens} tokens came with {len(rows or ())} rows of top logprobs")
    ids, logprobs = [list[int]()], [list[float]()]
    for position, row in enumerate(rows[1:], start=1):
        if len(row) < top_k:
            raise EngineError(f"{len(row)} top logprobs at position {position}, not {top_k}: lower top_k")
        pairs = [(float(value), int(token_id)) for token_id, value in row]
        best = sorted(pairs, reverse=True)[:top_k]
        bad = [(v, i) for v, i in pairs if not is_measured(v) or v > ROUNDING or not 0 <= i < 2**31]
        if bad or sum(math.exp(value) for value, _ in best) > 1 + ROUNDING:
            got = (bad or best)[0]
            raise EngineError(f"the top logprobs at position {position} are of no distribution (got {got!r})")
        ids.append([token_id for _, token_id in best])
        logprobs.append([value for value, _ in best])
    return ids, logprobs


def read_completion(choice: dict[str, Any], start_version: int, end_version: int) -> Completion:
    """A choice of a server's reply (`protocol.Sampled`). Raises EngineError unless each token has its own logprob.

    A logprob may be the sentinel, and the loss leaves such a token out; but not every one of a reply.
    """
    token_ids, reason, logprobs = read_tokens(choice), choice.get("finish_reason"), choice.get("logprobs")
    if not isinstance(logprobs, list) or len(logprobs) != len(token_ids):
        count = len(logprobs) if isinstance(logprobs, list) else 0
        raise EngineError(f"{len(token_ids)} sampled tokens came with {count} logprobs")
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        if not isinstance(logprob, int | float) or logprob > ROUNDING:
            raise EngineError(f"sampled token {token_id} came with the logprob {logprob!r}")
    if not any(map(is_measured, logprobs)):
        raise EngineError(f"none of its {len(logprobs)} tokens has a logprob (got {logprobs[0]!r})")
    return Completion(token_ids, [float(logprob) for logprob in logprobs], reason, start_version, end_version)


def read_tokens(choice: dict[str, Any]) -> list[int]:
    """The sampled tokens of a choice. Raises EngineError where there is none, or the reply was broken off."""
    token_ids = choice["token_ids"]
    if not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
        raise EngineError(f"its tokens are no list of token ids: {repr(token_ids)[:80]}")
    if choice.get("finish_reason") not in WHOLE:
        raise EngineError(f"it was broken off after {len(token_ids)} tokens ({choice['finish_reason']!r})")
    if not token_ids:
        raise EngineError("it has no token")
    return token_ids


def require_prompt(sent: list[int], reply: dict[str, Any]) -> None:
    """Raise EngineError where a server says that it continued other tokens than those that it was sent."""
    if reply.get("prompt_token_ids") not in (None, sent):
        raise EngineError("it continues another prompt than the one that was sent")
