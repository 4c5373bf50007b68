"""Reading what vLLM replies: sampled tokens with their logprobs, and the logprobs of a prompt."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prl.errors import EngineError, RequestAborted
from prl.wire.logprobs import is_measured


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


@contextlib.contextmanager
def reading(model: str) -> Iterator[None]:
    """Turn the errors of reading a reply of an unexpected shape into EngineError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"model {model!r} sent a reply that cannot be read: {error!r}") from error


def check_whole(reply: Any, url: str) -> None:
    """Raise RequestAborted for a reply whose server gave up: what was sampled by then is no completion."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    ends = [choice.get("finish_reason") for choice in choices or () if isinstance(choice, dict)]
    if "abort" in ends:
        raise RequestAborted(f"{url} gave a request up before its end, as a server does that is about to end")


def choices_of(reply: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """The `n` choices of a reply, in order."""
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    if len(choices) != n:
        raise EngineError(f"asked for {n} completions, got {len(choices)}")
    return choices


def read_prompt_logprobs(rows: Any, token_ids: list[int]) -> list[float]:
    """The logprob of each token of a prompt `[tokens]`, the first one's 0.0, from vLLM's rows of {token id: {logprob}}.

    Raises EngineError where one is missing or not finite.
    """
    if not isinstance(rows, list) or len(rows) != len(token_ids):
        raise EngineError(f"a prompt of {len(token_ids)} tokens came with {len(rows or [])} rows of logprobs")
    logprobs = [0.0]
    for position, (token_id, row) in enumerate(zip(token_ids[1:], rows[1:], strict=True), start=1):
        entry = (row or {}).get(str(token_id))
        value = entry.get("logprob") if isinstance(entry, dict) else None
        if not isinstance(value, int | float) or not is_measured(value):
            raise EngineError(f"no logprob for token {token_id} at position {position} (got {value!r})")
        logprobs.append(float(value))
    return logprobs


def read_completion(choice: dict[str, Any], start_version: int, end_version: int) -> Completion:
    """A choice of vLLM's reply. Raises EngineError unless each sampled token has its own logprob."""
    token_ids = choice["token_ids"]
    entries = (choice.get("logprobs") or {}).get("content")
    if entries is None or len(entries) != len(token_ids):
        raise EngineError(f"{len(token_ids)} sampled tokens came with {len(entries or [])} logprobs")
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry["token"] != f"token_id:{token_id}":
            raise EngineError(f"logprob of {entry['token']!r} where token_id:{token_id} was sampled")
        if not isinstance(entry["logprob"], int | float):
            raise EngineError(f"sampled token {token_id} came with the logprob {entry['logprob']!r}")
    logprobs = [float(entry["logprob"]) for entry in entries]
    return Completion(token_ids, logprobs, choice.get("finish_reason"), start_version, end_version)
