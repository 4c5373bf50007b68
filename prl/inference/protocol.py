"""What prl's client and prl's server say to each other about sampling: token ids in, token ids and logprobs out.

vLLM's own route for this makes an object of each logprob, with a text and a rank, which pydantic builds and checks: ten
times the processor time of numbers in lists, on either side.
"""

import json
from typing import Any

from msgspec import Struct
from msgspec.json import encode

GENERATE = "/prl/generate"
"""Route: POST a `GenerateRequest`, get `Generated`, both as JSON."""
JSON = {"Content-Type": "application/json"}


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """Continuations that are asked for."""

    model: str
    """Name that the server has for it."""
    token_ids: list[int]
    """The prompt."""
    sampling: dict[str, Any]
    """vLLM's sampling parameters."""
    cache_salt: str | None = None
    """Prompts share cached prefixes with those of the same salt."""


class Sequence(Struct):
    """One continuation: `token_ids` and `logprobs` are parallel."""

    index: int
    token_ids: list[int]
    logprobs: list[float | None]
    """Of each token under the distribution that it was drawn from; None where it is not a number."""
    finish_reason: str | None


class Generated(Struct):
    """The continuations of a prompt, in any order."""

    model: str
    prompt_token_ids: list[int]
    choices: list[Sequence]


def as_json(body: Any) -> bytes:
    """The body of a request. Texts may hold lone surrogates, which UTF-8 cannot encode: they are escaped."""
    try:
        return encode(body)
    except UnicodeEncodeError:
        return json.dumps(body).encode()
