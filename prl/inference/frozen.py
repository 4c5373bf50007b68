"""The client of a frozen model behind an OpenAI-compatible endpoint.

vLLM's `/v1/completions` takes and returns token ids; any other is asked for messages (`chat.py`).
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from prl.config.model_reference import FrozenModelConfig
from prl.errors import ConfigError, DeadlinePassed, EngineError, PrlError
from prl.inference.client import LONGEST_PAUSE_S, PAUSE_S, ModelPool, Read
from prl.inference.replies import (
    Completion,
    choices_of,
    read_prompt_logprobs,
    read_tokens,
    reading,
    require_prompt,
)
from prl.inference.routing import Prefix, Server
from prl.inference.tokenizers import TokenizerProbe
from prl.inference.updating import PROBE_TIMEOUT

log = logging.getLogger(__name__)

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

    async def generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], *, n: int = 1, prefix: Prefix | None = None
    ) -> list[Completion]:
        def read(reply: dict[str, Any]) -> list[Completion]:
            choices = choices_of(reply, n)
            if any(not isinstance(choice.get("token_ids"), list) for choice in choices):
                raise EngineError(
                    f"model {self.model!r} returns no token ids: its server does not support return_token_ids"
                )
            for choice in choices:
                require_prompt(prompt_ids, choice)
            return [Completion(read_tokens(choice), [], choice.get("finish_reason")) for choice in choices]

        asked = {**PLAIN, **sampling, "n": n, "return_token_ids": True}
        return await self._complete(prompt_ids, asked, read, n=n, prefix=prefix)

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        asked = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}

        def read(reply: dict[str, Any]) -> list[float]:
            return read_prompt_logprobs(choices_of(reply, 1)[0].get("prompt_logprobs"), token_ids)

        return await self._complete(token_ids, asked, read, timeout=aiohttp.ClientTimeout(total=self.timeout_s))

    async def chat(self, asked: dict[str, Any], read: Callable[[dict[str, Any]], Read]) -> Read:
        """Return what `read` makes of the reply of `/v1/chat/completions` to `asked`."""
        return await self._ask("/v1/chat/completions", asked, read)

    async def shares_tokenizer(self, probe: TokenizerProbe) -> bool | None:
        """Whether every endpoint takes and returns token ids of the policy's tokenizer; None where one does not say."""
        found = await asyncio.gather(*(self._tokens(url, probe.text) for url in self.urls))
        return None if None in found else all(token_ids == probe.token_ids for token_ids in found)

    async def require_tokenizer(self, probe: TokenizerProbe) -> None:
        """Raise ConfigError unless the model has the policy's tokenizer."""
        shared = await self.shares_tokenizer(probe)
        if shared is None:
            raise ConfigError(
                f"model {self.model!r} at {self.urls[0]} does not say how it tokenizes (its /v1/completions has no "
                f"return_token_ids, as vLLM's has), so nobody knows whether it has the tokenizer of {probe.model}, and "
                "that is needed to score its tokens: serve it with vLLM (python -m prl.serve)"
            )
        if not shared:
            raise ConfigError(
                f"model {self.model!r} at {self.urls[0]} has another tokenizer than the policy ({probe.model}): tokens "
                "are sent to it as ids. Choose a model of the policy's family; algo=sft takes one of any tokenizer"
            )

    async def _tokens(self, url: str, text: str) -> list[int] | None:
        """The tokens of `text` as the server reads it; None if it does not say."""
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False, "max_tokens": 1, "temperature": 0.0}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            reply = await self._request(
                "POST", url, "/v1/completions", json={**asked, "return_token_ids": True}, timeout=timeout
            )
        except EngineError as error:
            if error.status == 0:  # not refused: not answered
                raise
            log.info("model %r takes no token ids: %s", self.model, error)
            return None
        with reading(self.model):
            choice = reply["choices"][0]
            found = choice.get("prompt_token_ids")
            return found if isinstance(found, list) and isinstance(choice.get("token_ids"), list) else None

    async def close(self) -> None:
        if self._search is not None:
            self._search.cancel()
        await super().close()

    async def _complete(
        self, prompt_ids: list[int], asked: dict[str, Any], read: Callable[[dict[str, Any]], Read], **options: Any
    ) -> Read:
        return await self._ask("/v1/completions", {"prompt": prompt_ids, **asked}, read, **options)

    async def _ask(
        self,
        route: str,
        asked: dict[str, Any],
        read: Callable[[dict[str, Any]], Read],
        *,
        n: int = 1,
        prefix: Prefix | None = None,
        **options: Any,
    ) -> Read:
        def answered(reply: dict[str, Any]) -> Read:
            self._failing = None  # also by what cannot be used: the model is there
            return read(reply)

        give_up, tries = time.monotonic() + self.timeout_s, 0
        while True:
            server = self.router.choose(n, prefix) or self.servers[0]
            try:
                return await self._post(server, route, asked, answered, n=n, **options)
            except EngineError as error:
                tries += 1
                pause_s = self._pause_s(tries, error)
                asked_to_wait = error.status == 429 or error.wait_s is not None
                if not asked_to_wait or time.monotonic() + pause_s > give_up:
                    raise
            await asyncio.sleep(pause_s)

    def _pause_s(self, tries: int, error: EngineError) -> float:
        """Longer each time, and never the same for two clients that failed together; as long as the server asks for."""
        grown_s = min(PAUSE_S * 2 ** min(tries, 20), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
        return max(grown_s, error.wait_s or 0.0)

    def _note_failure(self, server: Server, error: EngineError) -> None:
        """Start looking for a model that is away.

        Raises DeadlinePassed for a model that can be reached and has answered no request for `timeout_s`.
        """
        super()._note_failure(server, error)
        now = server.failed_at
        first, last = self._failing or (now, now)
        if now - last > self.timeout_s:  # no request in between: this failure is a new one
            first = now
        self._failing = (first, now)
        if now - first > self.timeout_s:
            raise DeadlinePassed(f"model {self.model!r} at {self.urls[0]} has failed for {self.timeout_s:g} s: {error}")
        if self.up and all(each.avoided for each in self.servers):
            self._search = asyncio.create_task(self.wait_ready(self.timeout_s, again=True))

    async def served(self, url: str) -> dict[str, dict[str, Any]]:
        """What a server says of each model that it serves, by name. Raises EngineError where it does not answer."""
        reply = await self._request("GET", url, "/v1/models", timeout=PROBE_TIMEOUT)
        with reading(self.model):
            return {model["id"]: model for model in reply["data"]}

    async def _probe(self, server: Server) -> None:
        served = await self.served(server.url)
        if self.model not in served:
            raise PrlError(f"{server.url} serves {', '.join(map(repr, served)) or 'nothing'}, not {self.model!r}")


async def wait_until_served(
    reference: FrozenModelConfig, token: str, timeout_s: float, still_alive: Callable[[], None]
) -> None:
    """Wait until a frozen model of this machine answers; arguments and errors as of the pool and its `wait_ready`."""
    pool = FrozenPool(reference, token)
    try:
        await pool.wait_ready(timeout_s, still_alive)
    finally:
        await pool.close()
