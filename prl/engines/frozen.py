"""The client of a frozen model behind an OpenAI-compatible endpoint.

vLLM's `/v1/completions` takes and returns token ids; any other is asked for messages (`chat.py`).
"""

import asyncio
import functools
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tenacity

from prl.base.errors import ConfigError, DeadlinePassed, EngineError, PrlError
from prl.config.model_reference import FrozenModelConfig, check_reference
from prl.engines import replies
from prl.engines.base import Connect
from prl.engines.client import ModelPool, Read, scoring, servers_at
from prl.engines.http import PROBE_S, Endpoints, is_away
from prl.engines.protocol import GENERATE
from prl.engines.replies import Completion, Scored, reading
from prl.engines.servers import Server, Traffic
from prl.engines.tokenizers import TokenizerProbe
from prl.rollouts.images import as_data_urls
from prl.rollouts.inputs import ModelInput

if TYPE_CHECKING:
    from prl.rollouts.pictures import PictureStore

log = logging.getLogger(__name__)

PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent unless asked for otherwise: vLLM takes what a request leaves out from the model's own generation config."""
ROUTE_S = 30.0
"""Deadline of the question whether a server has prl's route, seconds."""


def asks_to_wait(error: BaseException) -> bool:
    """Return whether a server is busy, and to be asked again."""
    return isinstance(error, EngineError) and (error.status == 429 or error.wait_s is not None)


class Pause(tenacity.wait_exponential_jitter):
    """Longer each time, and never the same for two clients that failed together; as long as the server asks for."""

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        error = retry_state.outcome.exception() if retry_state.outcome is not None else None
        return max(super().__call__(retry_state), getattr(error, "wait_s", None) or 0.0)


class ReferencePool(ModelPool):
    """A frozen model, which algorithms sample from or score with."""

    timeout_s: float
    """Deadline to answer, at the start and after it went away, seconds."""

    @property
    def up(self) -> bool:
        """Return whether it can be reached. Raises DeadlinePassed once it has been away for too long."""
        return True

    @abstractmethod
    async def require_tokenizer(self, probe: TokenizerProbe) -> None:
        """Raise ConfigError unless it has the policy's tokenizer."""


class FrozenPool(ReferencePool):
    """A model without versions: its cache stays valid, its rollouts never age, and its logprobs are not recorded.

    When none of its servers answers any more, the pool looks for one until it can be reached again (`up`). The model
    has `timeout_s` to come back, and as long to answer requests as it should.
    """

    http: Endpoints

    def __init__(self, reference: FrozenModelConfig, token: str | None = None, pictures: "PictureStore | None" = None):
        """
        Args:
            reference: The model and its endpoint.
            token: The endpoint's key; None = the value of the environment variable `reference.api_key_var`, if any.
            pictures: The store of the pictures that the model is shown; None = none are.
        """
        super().__init__(reference.name, Traffic(servers_at(reference.urls)), pictures)
        self.http = Endpoints(self.model, token or os.environ.get(reference.api_key_var or ""), self.traffic)
        self.timeout_s = reference.timeout_s
        self._credentials = f"the key of model {self.model!r}, that of api_key_var={reference.api_key_var}"
        self._search: asyncio.Task | None = None
        self._by_prl: asyncio.Task[bool] | None = None
        """Finds out whether its servers have prl's route; None = nobody has asked for logprobs."""
        self._failing: tuple[float, float] | None = None
        """When requests began to fail and when one last failed; None once a request has been answered."""

    @property
    def up(self) -> bool:
        if self._search is not None and self._search.done():
            self._search.result()  # raises DeadlinePassed if the model was not found again
            self._search = None
        return self._search is None

    async def generate(
        self, prompt: ModelInput, sampling: dict[str, Any], *, n: int = 1, prefix: str | None = None
    ) -> list[Completion]:
        def read(reply: dict[str, Any]) -> list[Completion]:
            choices = replies.choices_of(reply, n)
            if any(not isinstance(choice.get("token_ids"), list) for choice in choices):
                raise EngineError(f"model {self.model!r} returns no token ids: its server has no return_token_ids")
            for choice in choices:
                replies.require_prompt(prompt.token_ids, choice)
            return [Completion(replies.read_tokens(choice), [], choice.get("finish_reason")) for choice in choices]

        if prompt.pictures:
            await self._require_prls_route()
            own = {**PLAIN, **sampling, "n": n, "detokenize": bool(sampling.get("stop"))}
            asked = {"token_ids": prompt.token_ids, "sampling": own, **self.picture_fields(prompt)}
            return await self._ask(GENERATE, asked, read, n=n, prefix=prefix)
        # With token ids: a text may tokenize to others than those that were sampled.
        body = {"prompt": prompt.token_ids, **PLAIN, **sampling, "n": n, "return_token_ids": True}
        return await self._ask("/v1/completions", body, read, n=n, prefix=prefix)

    async def top_logprobs(self, sequence: ModelInput, top_k: int) -> Scored:
        token_ids = sequence.token_ids
        if sequence.pictures:
            await self._require_prls_route()
        if await self._is_prls():
            asked = {"token_ids": token_ids, "sampling": scoring(top_k), **self.picture_fields(sequence)}
            read_prls = functools.partial(replies.read_scored, token_ids=token_ids, top_k=top_k)
            return await self._ask(GENERATE, asked, read_prls, timeout_s=self.timeout_s)
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}

        def read(reply: dict[str, Any]) -> Scored:
            rows: Any = replies.choices_of(reply, 1)[0].get("prompt_logprobs")
            own = replies.read_prompt_logprobs(replies.own_logprobs(rows, token_ids), token_ids)
            if not top_k:
                return Scored(own, [], [])
            top = [[(token_id, entry["logprob"]) for token_id, entry in (row or {}).items()] for row in rows]
            return Scored(own, *replies.read_top(top, len(token_ids), top_k))

        return await self._ask("/v1/completions", body, read, timeout_s=self.timeout_s)

    async def _require_prls_route(self) -> None:
        """Raise EngineError unless its servers are prl's: others make tokens and pixels of a picture by themselves."""
        if not await self._is_prls():
            raise EngineError(
                f"model {self.model!r} at {self.urls[0]} is no server of prl's, and takes no pictures that were made "
                "for the policy: serve it with python -m prl.serve, or choose teacher=local",
                400,
            )

    async def _is_prls(self) -> bool:
        """Return whether each server has prl's route. They are asked once."""
        if self._by_prl is None:
            self._by_prl = asyncio.create_task(self._has_prls_route())
        # Shielded: a rollout that is cancelled must not take the answer from the others that wait for it.
        return await asyncio.shield(self._by_prl)

    async def _has_prls_route(self) -> bool:
        """Return whether each server has prl's route, which makes no text of a logprob's token: most of the
        time of vLLM's own."""
        body = {"model": self.model, "token_ids": [0], "sampling": scoring(0)}
        asked = [self.http.request("POST", url, GENERATE, body, timeout_s=ROUTE_S) for url in self.urls]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return all(isinstance(answer, dict) and "prompt_logprobs" in answer for answer in answers)

    async def chat(self, body: dict[str, Any], read: Callable[[dict[str, Any]], Read], *, waits: bool = False) -> Read:
        """Return what `read` makes of the reply of `/v1/chat/completions` to `body`.

        With `waits` it comes within the model's `timeout_s`, and a model that is away is asked again for as long.
        """
        timeout_s = self.timeout_s if waits else None
        if self.pictures is not None:
            body = body | {"messages": as_data_urls(body["messages"], self.pictures)}
        return await self._ask("/v1/chat/completions", body, read, timeout_s=timeout_s, waits=waits)

    async def shares_tokenizer(self, probe: TokenizerProbe) -> bool | None:
        """Return whether every endpoint takes and returns the token ids of the policy; None where one does not say."""
        answers = await asyncio.gather(*(self._tokens(url, probe.text) for url in self.urls))
        return None if None in answers else all(token_ids == probe.token_ids for token_ids in answers)

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
                f"model {self.model!r} at {self.urls[0]} has another tokenizer than {probe.model}: tokens are sent to "
                "it as ids. Choose a model of the policy's family, or compare by text: algo.align=text, with the place "
                "of its tokenizer in teacher.tokenizer; algo=sft takes one of any tokenizer"
            )

    async def _tokens(self, url: str, text: str) -> list[int] | None:
        """The tokens of `text` as the server reads it; None if it does not say."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False, "max_tokens": 1, "temperature": 0.0}
        body |= {"return_token_ids": True}
        try:
            reply = await self.http.request("POST", url, "/v1/completions", body, timeout_s=self.timeout_s)
        except EngineError as error:
            if error.status == 0:  # not refused: not answered
                raise
            log.info("model %r takes no token ids: %s", self.model, error)
            return None
        with reading(self.model):
            choice = reply["choices"][0]
            token_ids = choice.get("prompt_token_ids")
            return token_ids if isinstance(token_ids, list) and isinstance(choice.get("token_ids"), list) else None

    async def wait_ready(
        self, timeout_s: float, still_alive: Callable[[], None] = lambda: None, *, again: bool = False
    ) -> None:
        """As of every model; `again` where it went away: then one of its servers is enough."""
        await self.http.wait_ready(self._probe, self._credentials, timeout_s, still_alive, again=again)

    async def close(self) -> None:
        for task in (self._search, self._by_prl):
            if task is not None:
                task.cancel()
        await super().close()

    async def _ask(
        self,
        route: str,
        body: dict[str, Any],
        read: Callable[[dict[str, Any]], Read],
        *,
        n: int = 1,
        prefix: str | None = None,
        timeout_s: float | None = None,
        waits: bool = False,
    ) -> Read:
        """Return what `read` makes of a server's reply.

        A server that is busy, or with `waits` away, is asked again for `timeout_s` of the model.
        """

        @tenacity.retry(
            retry=tenacity.retry_if_exception(lambda error: asks_to_wait(error) or (waits and is_away(error))),
            wait=Pause(multiplier=0.1, max=10.0, jitter=0.1),
            stop=tenacity.stop_before_delay(self.timeout_s),
            reraise=True,
        )
        async def ask() -> Read:
            # Not one more request to a model that is known to be away: the search asks it often enough.
            if waits and self._search is not None:
                await asyncio.wait([self._search])
            server = self.http.router.choose(n, prefix) or self.servers[0]
            try:
                reply = await self.http.post(server, route, body, n=n, timeout_s=timeout_s)
            except EngineError as error:
                if error.of_server:
                    self._note_failure(error)
                raise
            self._failing = None  # also by what cannot be used: the model is there
            if self._search is not None and self._search.done():
                self._search = None
            with self.http.reading(server, route):
                return read(reply)

        return await ask()

    def _note_failure(self, error: EngineError) -> None:
        """Start looking for a model that is away.

        Raises DeadlinePassed for a model that can be reached and has answered no request for `timeout_s`.
        """
        now = time.monotonic()
        first, last = self._failing or (now, now)
        if now - last > self.timeout_s:  # no request in between: this failure is a new one
            first = now
        self._failing = (first, now)
        if now - first > self.timeout_s:
            raise DeadlinePassed(f"model {self.model!r} at {self.urls[0]} has failed for {self.timeout_s:g} s: {error}")
        # One server that answers is enough: the router sends requests there.
        if self.up and all(server.avoided for server in self.servers):
            self._search = asyncio.create_task(self.wait_ready(self.timeout_s, again=True))

    async def served(self, url: str) -> dict[str, dict[str, Any]]:
        """Return what a server says of each model that it serves, by name. Raises EngineError where
        it gives no answer."""
        reply = await self.http.request("GET", url, "/v1/models", timeout_s=PROBE_S)
        with reading(self.model):
            return {model["id"]: model for model in reply["data"]}

    async def _probe(self, server: Server) -> None:
        served = await self.served(server.url)
        if self.model not in served:
            raise PrlError(f"{server.url} serves {', '.join(map(repr, served)) or 'nothing'}, not {self.model!r}")


def clients_of(hosted: Mapping[str, Connect], pictures: "PictureStore | None" = None) -> Connect:
    """Return what makes a client of any frozen model.

    Args:
        hosted: What makes those of models that are run for this run, by name. A reference with an address of its own
            means another model, and so does a name that is not there.
        pictures: The store of the pictures that the others are shown; None = none are.
    """

    def connect(reference: FrozenModelConfig) -> ReferencePool:
        if isinstance(reference, FrozenModelConfig) and reference.base_url is None and reference.name in hosted:
            return hosted[reference.name](reference)
        check_reference(reference, "the model to connect")
        return FrozenPool(reference, pictures=pictures)

    return connect
