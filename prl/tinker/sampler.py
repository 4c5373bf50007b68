"""Sampling from the base and from snapshots of clients' models, in whatever engine: requests and results.

A snapshot is a folder that never changes: peft's, of an adapter, or a model folder, of all weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from prl.engines.base import EngineSpec
from prl.engines.client import ModelPool
from prl.engines.replies import Completion, Scored
from prl.tinker.wire import RequestError, Sample
from prl.trainer.lora import WEIGHTS

SMALLEST = 1e-6
"""Smallest `top_p`, and temperature above 0: with less, logprobs in float32 are no numbers."""


class Snapshots(ABC):
    """The base and the snapshots beside it, one engine for all clients."""

    reserve: ClassVar[int] = 0
    """Tokens that the engine needs beside a sequence to score it."""
    spec: EngineSpec
    """The base."""
    pool: ModelPool
    """Answers with the weights that its engine has at the moment."""

    async def wait_ready(self, timeout_s: float, still_alive: Callable[[], None] = lambda: None) -> None:
        """Wait until the engine can answer, as `ModelPool` does."""
        await self.pool.wait_ready(timeout_s, still_alive)

    async def close(self) -> None:
        await self.pool.close()

    @abstractmethod
    async def continued(
        self, snapshot: Path | None, prompt: list[int], sampling: dict[str, Any], n: int
    ) -> list[Completion]:
        """Sample `n` continuations of a prompt from a snapshot, None = the base.

        `sampling` holds parameters by the names of `prl.engines.protocol`. Raises RequestError for those that the
        engine refuses.
        """

    @abstractmethod
    async def scored(self, snapshot: Path | None, tokens: list[int], top_k: int) -> Scored:
        """Score tokens with a snapshot, None = the base, and find the `top_k` likeliest in each place."""

    async def sample(self, snapshot: Path | None, request: Sample, prompt: list[int], seed: int) -> dict[str, Any]:
        """Answer a request for samples. Raises RequestError for what the engine does not do.

        Args:
            snapshot: The folder; None = the base.
            request: What is asked for.
            prompt: Its token ids, which have been checked.
            seed: Of the first sample; the next ones have the numbers behind it.
        """
        reserve = self.reserve if request.topk_sample_logprobs else 0
        sampling = sampling_of(request, self.spec.model.max_model_len - len(prompt) - reserve) | {"seed": seed}
        done = await self.continued(snapshot, prompt, sampling, request.num_samples)
        result: dict[str, Any] = {"type": "sample", "sequences": [_sequence(each) for each in done]}
        if request.topk_sample_logprobs:
            for sequence in result["sequences"]:
                scored = await self.scored(snapshot, prompt + sequence["tokens"], request.topk_sample_logprobs)
                sequence["topk_logprobs"] = _places(scored)[len(prompt) :]
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            scored = await self.scored(snapshot, prompt, request.topk_prompt_logprobs)
            hidden = len(prompt) - (request.prompt_logprobs_last_n or len(prompt) - 1)
            if request.prompt_logprobs:
                result["prompt_logprobs"] = [None] * hidden + scored.own[hidden:]
            if request.topk_prompt_logprobs:
                result["topk_prompt_logprobs"] = [None] * hidden + _places(scored)[hidden:]
        return result


def sampling_of(request: Sample, room: int) -> dict[str, Any]:
    """Return the sampling parameters of a request with room for so many tokens of a reply. Raises RequestError."""
    params = request.sampling_params
    if room < 1:
        raise RequestError("topk_sample_logprobs: the prompt leaves no room to score a reply")
    if params.top_k < -1 or not SMALLEST <= params.top_p <= 1:
        raise RequestError(f"sampling_params: top_k={params.top_k} top_p={params.top_p}: -1 or more, and (0, 1]")
    if 0 < params.temperature < SMALLEST:
        raise RequestError(f"sampling_params.temperature={params.temperature}: give 0, or at least {SMALLEST}")
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return {
        "max_tokens": min(params.max_tokens or room, room),
        "temperature": params.temperature,
        "stop": [word for word in stop if isinstance(word, str)],
        "stop_token_ids": [token for token in stop if isinstance(token, int)],
        "skip_special_tokens": False,
        "ignore_eos": params.stop == [],  # an empty list is a wish: not even the model's own ends stop it
        "top_k": params.top_k,
        "top_p": params.top_p,
    }


def identity(snapshot: Path) -> tuple[Path, int]:
    """Return what tells a snapshot from another one that gets its name once it is deleted."""
    return snapshot, snapshot.stat().st_mtime_ns


def has_adapter(snapshot: Path) -> bool:
    """Return whether a snapshot is an adapter; else it has all weights."""
    return (snapshot / WEIGHTS).is_file()


def _sequence(done: Completion) -> dict[str, Any]:
    return {"tokens": done.token_ids, "logprobs": done.logprobs, "stop_reason": done.finish_reason}


def _places(scored: Scored) -> list[list[list[Any]] | None]:
    """Return the likeliest tokens of each place with their logprobs; None of the first."""
    pairs = zip(scored.ids[1:], scored.logprobs[1:], strict=True)
    return [None, *([list(pair) for pair in zip(*place, strict=True)] for place in pairs)]
