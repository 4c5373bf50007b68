"""What prl's client and prl's server say to each other. Sampling: token ids in, token ids and logprobs out.

vLLM's own route for this makes an object of each logprob, with a text and a rank, which pydantic builds and checks: ten
times the processor time of numbers in lists, on either side.
"""

import json
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.json import encode

GENERATE = "/prl/generate"
"""Route: POST a `GenerateRequest`, get `Generated`, both as JSON."""
WHOSE = "/prl/run"
"""Route: GET the `run` whose weights the server has; empty where it has those that it began with."""
RUN = "X-Prl-Run"
"""Header of each request of a run once it has loaded weights: its `run_name`."""
RUN_NAME = re.compile("([0-9]{19})-[0-9a-z]+")
"""The time at which a run began [ns since 1970], and digits by chance: names sort by the time."""
TAKEN_OVER, ANOTHER_RUN = 409, "another run has begun with this server since"
"""HTTP status for a run that is not the last one to have begun with the server, and how the reason begins."""
AHEAD_NS = 24 * 3600 * 10**9
"""By how much the clock of a run may be ahead of a server's, ns: nothing comes after a name that is out of all time."""
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


def run_name(others: Iterable[object]) -> str:
    """A name for a run that begins now. It sorts after `others`, though a clock they were named by may be ahead."""
    found = [RUN_NAME.fullmatch(other) for other in others if isinstance(other, str)]
    began = max([time.time_ns(), *(int(name[1]) + 1 for name in found if name)])
    return f"{began:019d}-{secrets.token_hex(4)}"


def as_json(body: Any) -> bytes:
    """The body of a request. Texts may hold lone surrogates, which UTF-8 cannot encode: they are escaped."""
    try:
        return encode(body)
    except UnicodeEncodeError:
        return json.dumps(body).encode()
