"""Async clients over the servers of one model. Here: what all have in common, and the live policy's."""

import asyncio
import contextlib
import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from prl.errors import DeadlinePassed, EngineError
from prl.inference.auth import RUN_TOKEN_VARIABLE, TOKEN_VARIABLE

KEEP_ALIVE_S = 2.0
AVOID_S = 5.0
SENTINEL_LOGPROB = -9999.0  # what vLLM sends where it has no logprob


@dataclass(slots=True)
class Completion:
    """One sampled continuation: `token_ids` and `logprobs` are parallel; `finish_reason` is stop, length or null."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


class ModelPool(ABC):
    """Spreads requests over the servers of one model, the least loaded first. `token` is sent as a bearer token."""

    api_key_var: str | None
    """Environment variable that holds the token, for clients that are not ours."""

    def __init__(self, urls: list[str], model: str, token: str | None, *, request_timeout_s: float = 3600.0):
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.model = model
        self._in_flight = {url: 0 for url in self.urls}
        self._failed_at: dict[str, float] = {}
        """When a server last failed to answer; it comes last for a while."""
        self._session = aiohttp.ClientSession(
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            # The engine queues; a client-side limit would only hide it. Servers close idle connections after some seconds
            # (vLLM: 5), and a request that is sent just then is lost.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=30),
        )

    @property
    @abstractmethod
    def version(self) -> int | None:
        """Policy version that a request sent now starts from; None for a frozen model."""

    @property
    def cache_salt(self) -> str | None:
        """Keeps apart the cached prefixes of weights that differ."""
        return None if self.version is None else f"v{self.version}"

    @property
    def up(self) -> bool:
        """False while the model is away. Raises DeadlinePassed when it has been for too long."""
        return True

    @abstractmethod
    async def generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], *, n: int = 1, cache_salt: str | None = None
    ) -> list[Completion]:
        """Sample `n` continuations of one prompt in one request; `sampling` holds vLLM's sampling parameters."""

    @abstractmethod
    async def score(self, token_ids: list[int], *, cache_salt: str | None = None) -> list[float]:
        """Prefill logprobs `[tokens]` of `token_ids`, each looked up by its token id; the first token's is 0.0.

        Raises EngineError where a logprob is missing or not finite: such a value is never replaced by 0.0.
        """

    async def wait_ready(self, timeout_s: float, still_alive=lambda: None) -> None:
        """Wait until every server can answer. `still_alive` may raise to give up early.

        Raises DeadlinePassed naming the server that did not answer.
        """
        url, last = self.urls[0], "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                for url in self.urls:
                    while True:
                        still_alive()
                        try:
                            await self._look(url)
                            break
                        except EngineError as error:
                            if error.status in (401, 403):
                                raise
                            last = str(error)
                        await asyncio.sleep(0.1)
        except TimeoutError:
            raise DeadlinePassed(
                f"model {self.model!r} at {url} was not ready after {timeout_s:g} s ({last})"
            ) from None

    async def close(self) -> None:
        await self._session.close()

    @abstractmethod
    async def _look(self, url: str) -> None:
        """Raise EngineError unless the server can answer now."""

    async def _balanced(self, route: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        """POST to the server with the least in flight, of those that have not just failed if there are any."""
        url = min(self.urls, key=lambda url: (self._ailing(url), self._in_flight[url]))
        self._in_flight[url] += 1
        try:
            return await self._request("POST", url, route, json={"model": self.model, **body}, **options)
        except EngineError as error:
            if error.of_server:
                self._failed_at[url] = time.monotonic()
            raise
        finally:
            self._in_flight[url] -= 1

    @property
    def ailing(self) -> bool:
        """Whether a server has just failed to answer."""
        return any(map(self._ailing, self.urls))

    def _ailing(self, url: str) -> bool:
        return time.monotonic() - self._failed_at.get(url, -math.inf) < AVOID_S

    async def _request(self, method: str, url: str, route: str, **options: Any) -> Any:
        """The decoded JSON of the reply; EngineError for anything but a good one.

        Every request may be sent twice, and is where the server hung up without a word: it had closed an idle connection,
        as far as we had noticed before we wrote to it or not.
        """
        try:
            try:
                return await self._send(method, url, route, **options)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):  # there is no server
                    raise
                return await self._send(method, url, route, **options)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: not JSON
            raise EngineError(f"{url}{route} failed: {str(error) or type(error).__name__}") from error

    async def _send(self, method: str, url: str, route: str, **options: Any) -> Any:
        async with self._session.request(method, url + route, **options) as reply:
            if reply.status == 200:
                return msgspec.json.decode(await reply.read() or b"{}")
            text = (await reply.text())[:500]
            raise EngineError(f"{url}{route} answered HTTP {reply.status}: {text}", reply.status)


class InferencePool(ModelPool):
    """The live policy: its servers are prl's own, speak token ids and logprobs, and take new weights."""

    api_key_var = RUN_TOKEN_VARIABLE

    def __init__(self, urls: list[str], model: str, token: str, *, request_timeout_s: float = 3600.0):
        super().__init__(urls, model, token, request_timeout_s=request_timeout_s)
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    async def generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], *, n: int = 1, cache_salt: str | None = None
    ) -> list[Completion]:
        sampling = {**sampling, "n": n, "logprobs": 1, "detokenize": False}
        reply = await self._generate(prompt_ids, sampling, cache_salt)
        with reading(self.model):
            return [_completion(choice) for choice in choices_of(reply, n)]

    async def score(self, token_ids: list[int], *, cache_salt: str | None = None) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        reply = await self._generate(token_ids, sampling, cache_salt)
        with reading(self.model):
            return prompt_logprobs(reply.get("prompt_logprobs"), token_ids)

    async def update_weights(self, version: int, path: str, timeout_s: float = 300.0) -> None:
        """Load the safetensors folder `path` as policy `version` into every server.

        Running requests are kept: they go on under the new weights. No cached prefix of an older version survives.
        Raises DeadlinePassed or EngineError naming the server.
        """
        await asyncio.gather(*(self._update_one(url, version, path, timeout_s) for url in self.urls))
        self._version = version

    async def _update_one(self, url: str, version: int, path: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._request("POST", url, "/prl/load_policy", json={"path": path})
        except TimeoutError:
            raise DeadlinePassed(f"{url} did not load policy version {version} within {timeout_s:g} s") from None

    async def _generate(self, token_ids: list[int], sampling: dict[str, Any], cache_salt: str | None) -> dict[str, Any]:
        body = {"token_ids": token_ids, "sampling_params": sampling}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        return await self._balanced("/inference/v1/generate", body)

    async def _look(self, url: str) -> None:
        try:
            await self._request("GET", url, "/health", timeout=aiohttp.ClientTimeout(total=5))
        except EngineError as error:
            if error.status == 401:
                raise EngineError(f"{url} refused the token; start it with this run's {TOKEN_VARIABLE}", 401) from None
            raise


@contextlib.contextmanager
def reading(model: str):
    """A reply of another shape than expected is the server's error, not ours."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"model {model!r} answered something that cannot be read: {error!r}") from error


def choices_of(reply: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """The `n` choices of a reply, in order."""
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    if len(choices) != n:
        raise EngineError(f"asked for {n} completions, got {len(choices)}")
    return choices


def prompt_logprobs(rows: Any, token_ids: list[int]) -> list[float]:
    """`[tokens]`: the logprob of each token in vLLM's `rows` of {token id: {logprob}}; the first one's is 0.0."""
    if not isinstance(rows, list) or len(rows) != len(token_ids):
        raise EngineError(f"scoring {len(token_ids)} tokens gave {len(rows or [])} rows of logprobs")
    logprobs = [0.0]
    for position, (token_id, row) in enumerate(zip(token_ids[1:], rows[1:], strict=True), start=1):
        entry = (row or {}).get(str(token_id))
        value = entry.get("logprob") if isinstance(entry, dict) else None
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= SENTINEL_LOGPROB:
            raise EngineError(f"no logprob for token {token_id} at position {position} (got {value!r})")
        logprobs.append(float(value))
    return logprobs


def _completion(choice: dict[str, Any]) -> Completion:
    token_ids = choice["token_ids"]
    entries = (choice.get("logprobs") or {}).get("content")
    if entries is None or len(entries) != len(token_ids):
        raise EngineError(f"{len(token_ids)} sampled tokens came with {len(entries or [])} logprobs")
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry["token"] != f"token_id:{token_id}":
            raise EngineError(f"logprob of {entry['token']!r} where token_id:{token_id} was sampled")
        if not isinstance(entry["logprob"], int | float):
            raise EngineError(f"sampled token {token_id} came with the logprob {entry['logprob']!r}")
    return Completion(token_ids, [float(entry["logprob"]) for entry in entries], choice.get("finish_reason"))
