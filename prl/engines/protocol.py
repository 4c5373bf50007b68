"""Requests to a server of prl's and its replies, as JSON. Sampling: token ids in, token ids and logprobs out."""

import json
import math
from typing import Any

from msgspec import Struct
from msgspec.json import encode

from prl.rollouts.inputs import Picture

TOKEN_VARIABLE = "PRL_TOKEN"
"""Environment variable of a server's token; of a run's, where its servers already run."""
FROZEN_VARIABLE = "PRL_FROZEN"
"""Environment variable of a server that takes no weights, set to anything."""
ANOTHER_INSTANCE = 412
"""HTTP status for a request to the server as it was before a restart (`If-Match`), when it had loaded weights."""
GENERATE = "/prl/generate"
"""Route: POST a `GenerateRequest`, get `Generated`."""
LOAD = "/prl/load_policy"
"""Route: POST the `path` of a safetensors folder, which the server loads as the policy; servers of an engine that
`receives_weights` also take what `prl.weights.transfer` offers."""
LEAST = -9999.0
"""vLLM's stand-in for a logprob below it, as JSON has no infinities."""
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
    priority: int = 0
    """Requests of a lower one come first, where the server has `--scheduling-policy priority`; else it is 0."""
    pictures: list[Picture] = []
    """Those in the prompt, in their order."""
    picture_folder: str = ""
    """Their store (`prl.rollouts.pictures`), as the server finds it."""
    adapter: str | None = None
    """Folder of an adapter in peft's format, which is added to the weights for this request; it never changes."""


class Sampled(Struct):
    """One continuation: `token_ids` and `logprobs` are parallel."""

    index: int
    token_ids: list[int]
    logprobs: list[float | None]
    """Logprob of each token under the distribution that it was drawn from; None where it is not a number."""
    finish_reason: str | None


class Generated(Struct):
    """The continuations of a prompt, in any order."""

    prompt_token_ids: list[int]
    choices: list[Sampled]
    prompt_logprobs: list[float | None] | None = None
    """Logprob of each token of the prompt, where `sampling` asks for them; None for the first."""
    prompt_top: list[list[tuple[int, float | None]]] | None = None
    """Likeliest tokens in the place of each token of the prompt, where `sampling` asks for them: ids and logprobs."""


def measured(logprob: float) -> float | None:
    """A logprob as JSON can express it; None where it is not a number, or above all numbers."""
    return max(logprob, LEAST) if logprob < math.inf else None


def as_json(body: Any) -> bytes:
    """The body of a request. Texts may hold lone surrogates, which UTF-8 cannot encode: they are escaped."""
    try:
        return encode(body)
    except UnicodeEncodeError:
        return json.dumps(body).encode()
