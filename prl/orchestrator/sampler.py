"""Where an env's rollouts come from: a model's client pool, its renderer, and the sampling settings."""

import hashlib
from typing import Any

from prl.inference.client import Completion, InferencePool
from prl.orchestrator.algo.sampling import SamplingConfig


class Sampler:
    """Samples from the live policy: requests carry the policy version as cache salt, so no prefix outlives it."""

    def __init__(
        self,
        config: SamplingConfig,
        pool: InferencePool,
        renderer: Any,
        *,
        max_model_len: int,
        seed: int,
        tokenizer_path: str = "",
    ):
        self.config = config
        self.pool = pool
        self.renderer = renderer
        self.max_model_len = max_model_len
        self.seed = seed
        self.tokenizer_path = tokenizer_path
        self._stop_token_ids = renderer.get_stop_token_ids()

    @property
    def version(self) -> int:
        """Version of the model that a request sent now starts from."""
        return self.pool.version

    def parameters(self, key: str) -> dict[str, Any]:
        """vLLM's sampling parameters of the request that `key` names, its seed among them."""
        sampling = {"temperature": self.config.temperature, "seed": derive_seed(self.seed, key)}
        return sampling if self.config.max_tokens is None else sampling | {"max_tokens": self.config.max_tokens}

    async def complete(self, prompt_ids: list[int], *, n: int, key: str) -> list[Completion]:
        """`n` continuations of one prompt; `key` names the request."""
        room = self.max_model_len - len(prompt_ids)
        if room <= 0:
            raise OverlongPrompt(f"the prompt has {len(prompt_ids)} tokens; model.max_model_len is {self.max_model_len}")
        sampling = self.parameters(key) | {"stop_token_ids": self._stop_token_ids}
        sampling["max_tokens"] = min(room, self.config.max_tokens or room)
        # Greedy continuations of one prompt are all the same, and vLLM refuses to make several.
        distinct = 1 if self.config.temperature == 0 else n
        completions = await self.pool.generate(prompt_ids, sampling, n=distinct, cache_salt=f"v{self.version}")
        return completions * (n // distinct)


class OverlongPrompt(ValueError):
    """A prompt leaves no room for a completion."""


def derive_seed(seed: int, key: str) -> int:
    """A 31-bit seed that depends on nothing but the run's seed and the request's name."""
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
