"""Async client over one or several policy servers: generate, score, update weights."""

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from prl.config.errors import DeadlinePassed, PrlError

SENTINEL_LOGPROB = -9999.0  # what vLLM sends where it has no logprob


class EngineError(PrlError):
    """A server answered with an error or with something unusable. `status` is the HTTP status, 0 if there was none."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Completion:
    """One sampled continuation: `token_ids` and `logprobs` are parallel; `finish_reason` is stop, length or null."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


class InferencePool:
    """Spreads requests over the servers of one model, the least loaded first.

    `update_weights` is only for the live policy: frozen models are never updated.
    """

    def __init__(self, urls: list[str], model: str, token: str, *, request_timeout_s: float = 3600.0):
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.model = model
        self.version = 0
        self._in_flight = {url: 0 for url in self.urls}
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"},
            connector=aiohttp.TCPConnector(limit=0),  # the engine queues; a client-side limit would only hide it
            timeout=aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=30),
        )

    async def close(self) -> None:
        await self._session.close()

    async def wait_ready(self, timeout_s: float, still_alive=lambda: None) -> None:
        """Wait until every server answers `/health`. `still_alive` may raise to give up early.

        Raises DeadlinePassed naming the server that did not answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        for url in self.urls:
            last = "no answer"
            while True:
                still_alive()
                try:
                    async with self._session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=5)) as reply:
                        if reply.status == 200:
                            break
                        last = f"HTTP {reply.status}"
                        if reply.status == 401:
                            raise EngineError(f"{url} refused the token; start it with this run's PRL_TOKEN", 401)
                except (aiohttp.ClientError, TimeoutError) as error:
                    last = str(error) or type(error).__name__
                if loop.time() > deadline:
                    raise DeadlinePassed(f"model {self.model!r} at {url} was not ready after {timeout_s:g} s ({last})")
                await asyncio.sleep(0.1)

    async def generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], *, n: int = 1, cache_salt: str | None = None
    ) -> list[Completion]:
        """Sample `n` continuations of one prompt in one request; `sampling` holds vLLM's sampling parameters."""
        body = {"token_ids": prompt_ids, "sampling_params": {**sampling, "n": n, "logprobs": 1, "detokenize": False}}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        reply = await self._generate(body)
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        if len(choices) != n:
            raise EngineError(f"asked for {n} completions, got {len(choices)}")
        return [_completion(choice) for choice in choices]

    async def score(self, token_ids: list[int], *, cache_salt: str | None = None) -> list[float]:
        """Prefill logprobs `[tokens]` of `token_ids`, each looked up by its token id; the first token's is 0.0.

        Raises EngineError where a logprob is missing or not finite: such a value is never replaced by 0.0.
        """
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": token_ids, "sampling_params": sampling}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        reply = await self._generate(body)
        rows = reply.get("prompt_logprobs")
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

    async def update_weights(self, version: int, path: str, timeout_s: float = 300.0) -> None:
        """Load the safetensors folder `path` as policy `version` into every server.

        Running requests are kept: they go on under the new weights. No cached prefix of an older version survives.
        Raises DeadlinePassed or EngineError naming the server.
        """
        await asyncio.gather(*(self._update_one(url, version, path, timeout_s) for url in self.urls))
        self.version = version

    async def _update_one(self, url: str, version: int, path: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._post(url, "/prl/load_policy", {"path": path})
        except TimeoutError:
            raise DeadlinePassed(f"{url} did not load policy version {version} within {timeout_s:g} s") from None

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        url = min(self.urls, key=self._in_flight.__getitem__)
        self._in_flight[url] += 1
        try:
            return await self._post(url, "/inference/v1/generate", {"model": self.model, **body})
        finally:
            self._in_flight[url] -= 1

    async def _post(self, url: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            async with self._session.post(url + route, json=body) as reply:
                if reply.status == 200:
                    return msgspec.json.decode(await reply.read() or b"{}")
                text = (await reply.text())[:500]
                raise EngineError(f"{url}{route} answered HTTP {reply.status}: {text}", reply.status)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: not JSON
            raise EngineError(f"{url}{route} failed: {str(error) or type(error).__name__}") from error


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
