"""Client of a frozen model: any OpenAI-compatible completions endpoint that takes and returns token ids (vLLM does)."""

import asyncio
import os
import time
from typing import Any

import aiohttp

from prl.config.model_reference import FrozenModelConfig
from prl.errors import DeadlinePassed, EngineError, PrlError
from prl.inference.client import Completion, ModelPool, choices_of, prompt_logprobs, reading

# What is not asked for, servers take from the model's own generation config.
PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class FrozenPool(ModelPool):
    """Nobody updates it: its cache is stable, no logprobs of what it samples are asked for, its rollouts never age.

    When none of its servers answers any more, it is looked for, until one can be reached (`up`). It has `timeout_s` to come
    back, and to answer a request as it should.
    """

    def __init__(self, reference: FrozenModelConfig):
        self.api_key_var = reference.api_key_var
        token = None if reference.api_key_var is None else os.environ.get(reference.api_key_var)
        super().__init__(reference.urls, reference.name, token)
        self.timeout_s = reference.timeout_s
        self._search: asyncio.Task | None = None
        self._failing: tuple[float, float] | None = None
        """When requests began to fail, and when one last did; None since one was answered."""

    @property
    def version(self) -> None:
        return None

    @property
    def up(self) -> bool:
        if self._search is not None and self._search.done():
            self._search.result()  # raises where it was not found again
            self._search = None
        return self._search is None

    async def generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], *, n: int = 1, cache_salt: str | None = None
    ) -> list[Completion]:
        reply = await self._complete(prompt_ids, {**PLAIN, **sampling, "n": n, "return_token_ids": True})
        with reading(self.model):
            choices = choices_of(reply, n)
            if any(not isinstance(choice.get("token_ids"), list) for choice in choices):
                raise EngineError(
                    f"model {self.model!r} returns no token ids: its server does not know return_token_ids"
                )
            return [Completion(choice["token_ids"], [], choice.get("finish_reason")) for choice in choices]

    async def score(self, token_ids: list[int], *, cache_salt: str | None = None) -> list[float]:
        asked = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        reply = await self._complete(token_ids, asked, timeout=aiohttp.ClientTimeout(total=self.timeout_s))
        with reading(self.model):
            return prompt_logprobs(choices_of(reply, 1)[0].get("prompt_logprobs"), token_ids)

    async def close(self) -> None:
        if self._search is not None:
            self._search.cancel()
        await super().close()

    async def _complete(self, prompt_ids: list[int], asked: dict[str, Any], **options: Any) -> dict[str, Any]:
        try:
            reply = await self._balanced("/v1/completions", {"prompt": prompt_ids, **asked}, **options)
        except EngineError as error:
            if error.of_server:
                self._note_failure(error)
            raise
        self._failing = None
        return reply

    def _note_failure(self, error: EngineError) -> None:
        """Look for a model that is away; raise DeadlinePassed for one that looks well and has long answered nothing."""
        now = time.monotonic()
        first, last = self._failing or (now, now)
        if now - last > self.timeout_s:  # nobody asked meanwhile: another failure, not the same
            first = now
        self._failing = (first, now)
        if now - first > self.timeout_s:
            raise DeadlinePassed(f"model {self.model!r} at {self.urls[0]} has failed for {self.timeout_s:g} s: {error}")
        if self.up and all(map(self._ailing, self.urls)):
            self._search = asyncio.create_task(self._find())

    async def _find(self) -> None:
        """Wait until one of its servers can be reached."""
        last = "no answer"
        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    for url in self.urls:
                        try:
                            return await self._look(url)
                        except EngineError as error:
                            last = str(error)
                    await asyncio.sleep(0.1)
        except TimeoutError:
            where = ", ".join(self.urls)
            raise DeadlinePassed(
                f"model {self.model!r} at {where} was away for {self.timeout_s:g} s ({last})"
            ) from None

    async def _look(self, url: str) -> None:
        try:
            reply = await self._request("GET", url, "/v1/models", timeout=aiohttp.ClientTimeout(total=5))
        except EngineError as error:
            if error.status in (401, 403):
                raise EngineError(
                    f"{url} refused the key of model {self.model!r}: api_key_var has to name the environment variable that "
                    f"holds it (now {self.api_key_var})",
                    error.status,
                ) from None
            raise
        with reading(self.model):
            served = [model["id"] for model in reply["data"]]
        if self.model not in served:
            raise PrlError(f"{url} serves {', '.join(map(repr, served)) or 'nothing'}, not {self.model!r}")
