"""Where an env's rollouts come from: a model's client pool, its renderer, and the sampling settings."""

import copy
import dataclasses
import hashlib
from typing import Any

from prl.inference.client import Completion, ModelPool
from prl.inference.sampling import SamplingConfig


class Sampler:
    """Samples from one model, the live policy or a frozen one; which of them, only the pool knows.

    Requests to the policy carry its version as cache salt, so that no prefix outlives it.
    """

    def __init__(
        self,
        config: SamplingConfig,
        pool: ModelPool,
        renderer: Any,
        *,
        max_model_len: int,
        seed: int,
        tokenizer_path: str = "",
        reserve: int = 0,
    ):
        self.config = config
        self.pool = pool
        self.renderer = renderer
        self.max_model_len = max_model_len
        self.seed = seed
        self.tokenizer_path = tokenizer_path
        self.reserve = reserve
        """Tokens that a reference needs beside the rollout's own to score it."""
        self._stop_token_ids = renderer.get_stop_token_ids()

    async def setup(self) -> None:
        """Wait for a frozen source; the policy is ready before anything is built on it."""
        if self.version is None:
            await self.pool.wait_ready(self.pool.timeout_s)

    async def close(self) -> None:
        """Close the client of a frozen source; the policy's belongs to the run."""
        if self.version is None:
            await self.pool.close()

    @property
    def version(self) -> int | None:
        """Policy version that a request sent now starts from; None where a frozen model samples."""
        return self.pool.version

    def parameters(self, key: str) -> dict[str, Any]:
        """vLLM's sampling parameters of the request that `key` names, its seed among them."""
        sampling = {"temperature": self.config.temperature, "seed": derive_seed(self.seed, key)}
        return sampling if self.config.max_tokens is None else sampling | {"max_tokens": self.config.max_tokens}

    def limited(self, max_tokens: int) -> "Sampler":
        """This sampler with replies of at most `max_tokens`, if it has no limit of its own."""
        if self.config.max_tokens is not None:
            return self
        own = copy.copy(self)
        own.config = dataclasses.replace(self.config, max_tokens=max_tokens)
        return own

    async def complete(self, prompt_ids: list[int], *, n: int, key: str) -> list[Completion]:
        """`n` continuations of one prompt; `key` names the request."""
        # The last place stays free: a reference that scores the sequence has to sample one token behind it.
        room = self.max_model_len - 1 - self.reserve - len(prompt_ids)
        if room <= 0:
            kept = f", {self.reserve} of them kept for scoring" if self.reserve else ""
            raise OverlongPrompt(
                f"a prompt of {len(prompt_ids)} tokens leaves no room for an answer: "
                f"model.max_model_len is {self.max_model_len}{kept}"
            )
        sampling = self.parameters(key) | {"stop_token_ids": self._stop_token_ids}
        sampling["max_tokens"] = min(room, self.config.max_tokens or room)
        # Greedy continuations of one prompt are all the same, and vLLM refuses to make several.
        distinct = 1 if self.config.temperature == 0 else n
        completions = await self.pool.generate(prompt_ids, sampling, n=distinct, cache_salt=self.pool.cache_salt)
        return completions * (n // distinct)


class OverlongPrompt(ValueError):
    """A prompt leaves no room for a completion."""

    kind = "overlong_prompt"


def derive_seed(seed: int, key: str) -> int:
    """A 31-bit seed that depends on nothing but the run's seed and the request's name."""
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
