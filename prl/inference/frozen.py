"""The client of a frozen model behind an OpenAI-compatible completions endpoint that exchanges token ids, as vLLM's."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import aiohttp

from prl.config.model_reference import FrozenModelConfig
from prl.errors import DeadlinePassed, EngineError, PrlError
from prl.inference.client import PROBE_TIMEOUT, ModelPool
from prl.inference.replies import Completion, choices_of, read_prompt_logprobs, reading

PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent unless asked for otherwise: vLLM takes what a request leaves out from the model's own generation config."""


class FrozenPool(ModelPool):
    """A model without versions: its cache stays valid, its rollouts never age, and its logprobs are not recorded.

    When none of its servers answers any more, the pool looks for one until it can be reached again (`up`). The model
    has `timeout_s` to come back, and as long to answer requests as it should.
    """

    def __init__(self, reference: FrozenModelConfig, token: str | None = None):
        """
        Args:
            reference: The model and its endpoint.
            token: The endpoint's key; None = the value of the environment variable `reference.api_key_var`, if any.
        """
        super().__init__(reference.urls, reference.name, token or os.environ.get(reference.api_key_var or ""))
        self.timeout_s = reference.timeout_s
        self.credentials = (
            f"the key of model {self.model!r}: api_key_var must name the environment variable that holds it "
            f"(now {reference.api_key_var})"
        )
        self._search: asyncio.Task | None = None
        self._failing: tuple[float, float] | None = None
        """When requests began to fail and when one last failed; None once a request has been answered."""

    @property
    def up(self) -> bool:
        """Whether the model can be reached. Raises DeadlinePassed once it has been away for too long."""
        if self._search is not None and self._search.done():
            self._search.result()  # raises DeadlinePassed if the model was not found again
            self._search = None
        return self._search is None

    async def generate(self, prompt_ids: list[int], sampling: dict[str, Any], *, n: int = 1) -> list[Completion]:
        reply = await self._complete(prompt_ids, {**PLAIN, **sampling, "n": n, "return_token_ids": True})
        with reading(self.model):
            choices = choices_of(reply, n)
            if any(not isinstance(choice.get("token_ids"), list) for choice in choices):
                raise EngineError(
                    f"model {self.model!r} returns no token ids: its server does not support return_token_ids"
                )
            return [Completion(choice["token_ids"], [], choice.get("finish_reason")) for choice in choices]

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        asked = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        reply = await self._complete(token_ids, asked, timeout=aiohttp.ClientTimeout(total=self.timeout_s))
        with reading(self.model):
            return read_prompt_logprobs(choices_of(reply, 1)[0].get("prompt_logprobs"), token_ids)

    async def close(self) -> None:
        if self._search is not None:
            self._search.cancel()
        await super().close()

    async def _complete(self, prompt_ids: list[int], asked: dict[str, Any], **options: Any) -> dict[str, Any]:
        reply: dict[str, Any] = await self._post("/v1/completions", {"prompt": prompt_ids, **asked}, **options)
        self._failing = None
        return reply

    def _note_failure(self, url: str, error: EngineError) -> None:
        """Start looking for a model that is away.

        Raises DeadlinePassed for a model that can be reached and has answered no request for `timeout_s`.
        """
        super()._note_failure(url, error)
        now = self.failed_at[url]
        first, last = self._failing or (now, now)
        if now - last > self.timeout_s:  # no request in between: this failure is a new one
            first = now
        self._failing = (first, now)
        if now - first > self.timeout_s:
            raise DeadlinePassed(f"model {self.model!r} at {self.urls[0]} has failed for {self.timeout_s:g} s: {error}")
        if self.up and all(map(self._avoided, self.urls)):
            self._search = asyncio.create_task(self.wait_ready(self.timeout_s, again=True))

    async def served(self, url: str) -> dict[str, dict[str, Any]]:
        """What a server says of each model that it serves, by name. Raises EngineError where it does not answer."""
        reply = await self._request("GET", url, "/v1/models", timeout=PROBE_TIMEOUT)
        with reading(self.model):
            return {model["id"]: model for model in reply["data"]}

    async def _probe(self, url: str) -> None:
        served = await self.served(url)
        if self.model not in served:
            raise PrlError(f"{url} serves {', '.join(map(repr, served)) or 'nothing'}, not {self.model!r}")


async def wait_until_served(
    reference: FrozenModelConfig, token: str, timeout_s: float, still_alive: Callable[[], None]
) -> None:
    """Wait until a frozen model of this machine answers; arguments and errors as of the pool and its `wait_ready`."""
    pool = FrozenPool(reference, token)
    try:
        await pool.wait_ready(timeout_s, still_alive)
    finally:
        await pool.close()
