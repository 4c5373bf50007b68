"""Async clients of model servers: the base class, and the client of the live policy."""

import asyncio
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec

from prl.deadline import Deadline
from prl.errors import UNREADABLE, DeadlinePassed, EngineError, RequestAborted
from prl.inference.lasting import Lasting
from prl.inference.protocol import GENERATE, JSON, as_json
from prl.inference.replies import Completion, check_whole, read_completions, read_prompt_logprobs, reading
from prl.inference.server import TOKEN_VARIABLE
from prl.inference.traffic import Traffic

Read = TypeVar("Read")

KEEP_ALIVE_S = 2.0
"""Idle connections are closed after this long: servers close them too (vLLM after 5 s), and a request sent just then is
lost."""
RETRY_AFTER_S = (0.0, 0.1)
"""Pauses before a lost request is sent again."""
AVOID_S = 5.0
"""A server that failed to answer is avoided for this long while another can take the request."""

REQUEST_FLOOR_S = 300.0
"""The deadline of a request is never shorter: it may have to queue, and answers grow longer as a model learns."""
CONNECT_S = 30.0

ENDING = "shutting down"
"""In what vLLM answers once it has been asked to end; it may take ten seconds more, and say that it is well."""
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5)
"""For a question that a server answers at once."""


class ModelPool(Lasting):
    """Connections to the servers of one model; each request goes to the one with the fewest in flight."""

    version: int | None = None
    """Policy version that a request sent now starts from; None for a frozen model."""
    credentials: str
    """What a server may refuse us for, and the setting that it comes from."""

    def __init__(self, urls: list[str], model: str, token: str | None, *, request_timeout_s: float = 3600.0):
        """
        Args:
            urls: Base URLs of the servers, with or without `/v1`.
            model: The name they serve the model under.
            token: Sent as a bearer token; None = none is sent.
            request_timeout_s: Deadline of one request, seconds.
        """
        super().__init__()
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        """Without `/v1`."""
        self.model = model
        self._token = token
        self.traffic = Traffic(self.urls)
        self.answered = 0
        """Requests that were answered so far."""
        self._request_timeout_s = request_timeout_s
        self._deadline = Deadline(REQUEST_FLOOR_S)
        self._session = aiohttp.ClientSession(
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            # The engine queues requests itself; a limit on this side would only hide the queue.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=CONNECT_S),
        )

    @property
    def token(self) -> str | None:
        """The bearer token that the servers expect, for clients other than this one."""
        return self._token

    @property
    def cache_salt(self) -> str | None:
        """Sent with requests, to keep cached prefixes of different weights apart; None for a frozen model."""
        return None if self.version is None else f"v{self.version}"

    @abstractmethod
    async def generate(self, prompt_ids: list[int], sampling: dict[str, Any], *, n: int = 1) -> list[Completion]:
        """Sample `n` continuations of one prompt in one request; `sampling` holds vLLM's sampling parameters."""

    @abstractmethod
    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Prefill logprobs `[tokens]` of `token_ids`, each looked up by its token id; the first token's is 0.0.

        Raises EngineError where a logprob is missing or not finite: such a value is never replaced by 0.0.
        """

    async def wait_ready(
        self, timeout_s: float, still_alive: Callable[[], None] = lambda: None, *, again: bool = False
    ) -> None:
        """Wait until every server can answer.

        Args:
            timeout_s: Deadline for all of them, seconds.
            still_alive: Called before each try; what it raises ends the wait early.
            again: The model went away: one of its servers is enough, and one that refuses the token may stop doing so.

        Raises:
            DeadlinePassed: Naming the servers that did not answer.
            EngineError: At once, where a server refuses the token.
        """
        silent, last = deque(self.urls), "no answer"
        enough = len(self.urls) - 1 if again else 0
        try:
            async with asyncio.timeout(timeout_s):
                while len(silent) > enough:
                    still_alive()
                    try:
                        await self._probe(silent[0])
                        silent.popleft()
                    except EngineError as error:
                        if error.status in (401, 403) and not again:
                            raise EngineError(f"{silent[0]} refused {self.credentials}", error.status) from None
                        last = str(error)
                        silent.rotate(-1)
                        await asyncio.sleep(0.1)
        except TimeoutError:
            state = "away for" if again else "not ready after"
            raise DeadlinePassed(
                f"model {self.model!r} at {', '.join(silent)} was {state} {timeout_s:g} s ({last})"
            ) from None

    async def close(self) -> None:
        await self._session.close()

    @property
    def requests_in_flight(self) -> int:
        return sum(self.traffic.in_flight.values())

    @property
    def ailing(self) -> bool:
        """Whether a server has just failed to answer."""
        return any(map(self._avoided, self.urls))

    def _avoided(self, url: str) -> bool:
        return time.monotonic() - self.failed_at.get(url, float("-inf")) < AVOID_S

    async def _post(self, route: str, body: dict[str, Any], read: Callable[[Any], Read], **options: Any) -> Read:
        """What `read` makes of the reply to a request about the model.

        It goes to the least busy server; one that has just failed, or sent what cannot be used, comes last.
        """
        url = min(self.urls, key=lambda url: (self._avoided(url), self.traffic.in_flight[url]))
        limit_s, started = self._deadline.limit(self._request_timeout_s), time.monotonic()
        options.setdefault("timeout", aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S))
        try:
            with self.traffic.request(url):
                reply = await self._request("POST", url, route, json={"model": self.model, **body}, **options)
            check_whole(reply, url)
            self._deadline.seen(time.monotonic() - started)
            self.answered += 1
        except EngineError as error:
            if error.of_server:
                self._note_failure(url, error)
            raise
        try:
            with reading(f"{url}{route}"):
                return read(reply)
        except EngineError:
            self.failed_at[url] = time.monotonic()
            raise

    def _note_failure(self, url: str, error: EngineError) -> None:
        """Called when a server has failed, rather than refused one request."""
        self.failed_at[url] = time.monotonic()

    async def _request(self, method: str, url: str, route: str, **options: Any) -> Any:
        """The decoded JSON of the reply. Raises EngineError for anything but HTTP 200 with JSON.

        Requests are idempotent. Retry where the server closed an idle keep-alive connection, whether or not the close
        was noticed before the request was written. It will have closed others too, which a pause lets us notice.
        """
        if (body := options.pop("json", None)) is not None:
            options |= {"data": as_json(body), "headers": JSON}
        try:
            for pause_s in RETRY_AFTER_S:
                try:
                    return await self._send(method, url, route, **options)
                except aiohttp.ClientConnectorError:  # nothing listens there: not a connection that was closed
                    raise
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    await asyncio.sleep(pause_s)
            return await self._send(method, url, route, **options)
        except TimeoutError as error:
            waited_s = getattr(options.get("timeout"), "total", None) or self._request_timeout_s
            reason = str(error) or f"timeout, no answer within {waited_s:g} s"
            raise EngineError(f"{url}{route} failed: {reason}") from error
        except (aiohttp.ClientError, *UNREADABLE) as error:
            raise EngineError(f"{url}{route} failed: {str(error) or type(error).__name__}") from error

    async def _send(self, method: str, url: str, route: str, **options: Any) -> Any:
        async with self._session.request(method, url + route, **options) as reply:
            if reply.status == 200:
                return msgspec.json.decode(await reply.read() or b"{}")
            text = (await reply.text())[:500]
            ending = reply.status >= 500 and ENDING in text.lower()
            raise (RequestAborted if ending else EngineError)(
                f"{url}{route} answered HTTP {reply.status}: {text}", reply.status
            )


class InferencePool(ModelPool):
    """The live policy: prl's own servers, which exchange token ids and logprobs and load new weights.

    Invariant: no request is sent while weights are being loaded, so the version that it starts from is known. One that
    was sent before may live through the update: its last token is then at most of the version being loaded.
    """

    credentials = f"the token; start it with this run's {TOKEN_VARIABLE}"

    def __init__(self, urls: list[str], model: str, token: str, *, request_timeout_s: float = 3600.0):
        super().__init__(urls, model, token, request_timeout_s=request_timeout_s)
        self.version: int = 0
        self._newest = 0
        self._loading = asyncio.Lock()
        self._path: str | None = None
        """Where the weights of `version` are; None = the servers began with them."""
        self._update_deadline = Deadline()

    @property
    def loading(self) -> int | None:
        """The version that is being loaded."""
        return self._newest if self._loading.locked() else None

    async def generate(self, prompt_ids: list[int], sampling: dict[str, Any], *, n: int = 1) -> list[Completion]:
        # vLLM searches for stop strings in the text, which it makes only when asked to detokenise.
        sampling = {**sampling, "n": n, "detokenize": bool(sampling.get("stop"))}
        return await self._ask(
            GENERATE,
            {"token_ids": prompt_ids, "sampling": sampling},
            lambda reply, version: read_completions(reply, self.model, prompt_ids, n, version, self._newest),
        )

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        return await self._ask(
            "/inference/v1/generate",
            {"token_ids": token_ids, "sampling_params": sampling},
            lambda reply, _: read_prompt_logprobs(reply.get("prompt_logprobs"), token_ids),
        )

    async def update_weights(self, version: int, path: str, timeout_s: float = 300.0) -> None:
        """Load new weights into every server.

        Running requests are kept and continue under the new weights. No cached prefix of an older version survives.

        Args:
            version: The policy version of the weights.
            path: Their safetensors folder.
            timeout_s: Upper bound of the deadline for each server, seconds.

        Raises:
            DeadlinePassed, EngineError: Naming the server.
        """
        async with self._loading:
            self._newest = version
            limit_s = self._update_deadline.limit(timeout_s)
            updates = (self._lasting(partial(self._update_one, url, version, path, limit_s)) for url in self.urls)
            with self.traffic.loading(version):
                await asyncio.gather(*updates)
            self.version, self._path = version, path

    async def _restore(self, timeout_s: float) -> None:
        if self._path is not None:
            await asyncio.gather(*(self._update_one(url, self.version, self._path, timeout_s) for url in self.urls))

    async def _update_one(self, url: str, version: int, path: str, timeout_s: float) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._request("POST", url, "/prl/load_policy", json={"path": path})
            if not (isinstance(reply, dict) and "loaded" in reply):
                raise EngineError(f"{url}/prl/load_policy does not say that policy version {version} is loaded")
            self._update_deadline.seen(time.monotonic() - started)
        except TimeoutError:
            raise DeadlinePassed(f"{url} did not load policy version {version} within {timeout_s:g} s") from None

    async def _ask(self, route: str, body: dict[str, Any], read: Callable[[dict[str, Any], int], Read]) -> Read:
        """What `read` makes of the reply and the version that the request started from."""

        async def send() -> Read:
            async with self._loading:  # only to wait for its end
                version = self.version
            return await self._post(route, {**body, "cache_salt": self.cache_salt}, lambda reply: read(reply, version))

        return await self._lasting(send)

    async def _probe(self, url: str) -> None:
        await self._request("GET", url, "/health", timeout=PROBE_TIMEOUT)
