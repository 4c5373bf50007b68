"""Async clients of model servers: the base class, and the client of the live policy."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp

from prl.errors import UNREADABLE, DeadlinePassed, EngineError, TakenOver
from prl.inference.protocol import GENERATE, JSON, TAKEN_OVER, as_json
from prl.inference.replies import Completion, check_whole, content_of, read_completions, read_prompt_logprobs, reading
from prl.inference.routing import Prefix, Router, Server
from prl.inference.server import TOKEN_VARIABLE
from prl.inference.traffic import Traffic
from prl.inference.updating import PROBE_TIMEOUT, Updating

Read = TypeVar("Read")

KEEP_ALIVE_S = 2.0
"""Idle connections are closed after this long: servers close them too (vLLM after 5 s), and a request sent just then is
lost."""
RETRY_AFTER_S = (0.0, 0.1)
"""Pauses before a lost request is sent again."""

CONNECT_S = 30.0
PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Of the pauses of somebody else's server, which double, the first and the longest."""


class ModelPool(ABC):
    """Connections to the servers of one model; `routing.py` says which of them gets a request."""

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
        self.headers: dict[str, str] = {}
        """What servers are told with each request besides the token."""
        self.servers = [Server(url) for url in self.urls]
        self.traffic = Traffic(self.urls)
        self.router = Router(self.servers, self.traffic.load)
        self.answered = 0
        """Requests that were answered so far."""
        self._request_timeout_s = request_timeout_s
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
    async def generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], *, n: int = 1, prefix: Prefix | None = None
    ) -> list[Completion]:
        """Sample `n` continuations of one prompt in one request.

        Args:
            prompt_ids: The prompt `[tokens]`.
            sampling: vLLM's sampling parameters.
            n: Number of continuations.
            prefix: What the prompt begins with; None = nothing that another request has in common with it.
        """

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
        silent, last, tries = deque(self.servers), "no answer", 0
        enough = len(self.servers) - 1 if again else 0
        try:
            async with asyncio.timeout(timeout_s):
                while len(silent) > enough:
                    still_alive()
                    try:
                        await self._probe(silent[0])
                        silent.popleft()
                    except EngineError as error:
                        if error.status in (401, 403) and not again:
                            raise EngineError(f"{silent[0].url} refused {self.credentials}", error.status) from None
                        last, tries = str(error), tries + 1
                        silent.rotate(-1)
                        await asyncio.sleep(self._pause_s(min(tries, 4), error))  # a model that starts is soon noticed
        except TimeoutError:
            state = "away for" if again else "not ready after"
            raise DeadlinePassed(
                f"model {self.model!r} at {', '.join(each.url for each in silent)} was {state} {timeout_s:g} s ({last})"
            ) from None

    def _pause_s(self, tries: int, error: EngineError) -> float:
        """Time before a server that failed with `error` is asked again, after so many tries."""
        return PAUSE_S

    async def close(self) -> None:
        await self._session.close()

    @property
    def requests_in_flight(self) -> int:
        return sum(self.traffic.in_flight.values())

    def address(self, number: int) -> str:
        """The URL of a server for requests that another client sends; `number` chooses among those of the rotation."""
        ready = [server for server in self.servers if server.open] or self.servers
        return ready[number % len(ready)].url

    @property
    def ailing(self) -> bool:
        """Whether a server has just failed to answer."""
        return any(server.avoided for server in self.servers)

    @abstractmethod
    async def _probe(self, server: Server) -> None:
        """Raise EngineError unless the server can answer now."""

    async def _post(
        self,
        server: Server,
        route: str,
        body: dict[str, Any],
        read: Callable[[Any], Read],
        *,
        n: int = 1,
        **options: Any,
    ) -> Read:
        """What `read` makes of a server's reply to a request about the model, for `n` sequences."""
        try:
            with self.traffic.request(server.url, n):
                reply = await self._request("POST", server.url, route, json={"model": self.model, **body}, **options)
            check_whole(reply, server.url)
            self.answered += 1
        except EngineError as error:
            if error.of_server:
                self._note_failure(server, error)
            raise
        try:
            with reading(f"{server.url}{route}"):
                return read(reply)
        except EngineError:
            server.failed()
            raise

    def _note_failure(self, server: Server, error: EngineError) -> None:
        """Called when a server has failed, rather than refused one request."""
        server.failed()

    async def _request(self, method: str, url: str, route: str, **options: Any) -> Any:
        """The decoded JSON of the reply. Raises EngineError for anything but HTTP 200 with JSON.

        Requests are idempotent. Retry where the server closed an idle keep-alive connection, whether or not the close
        was noticed before the request was written. It will have closed others too, which a pause lets us notice.
        """
        if (body := options.pop("json", None)) is not None:
            options |= {"data": as_json(body), "headers": JSON | options.get("headers", {})}
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
        # A redirect would take the token and the prompt to whoever is named there.
        async with self._session.request(method, url + route, allow_redirects=False, **options) as reply:
            return await content_of(reply, f"{url}{route}")


class InferencePool(ModelPool, Updating):
    """The live policy: prl's own servers, which exchange token ids and logprobs and load new weights.

    Invariant: a server is sent no request while it loads weights, so the version that one starts from is known. One
    that was sent before may live through the update: its last token is then at most of the version being loaded.
    """

    version: int
    _lost = ""
    """How the first server that a later run has taken over refused a request."""
    credentials = f"the token; start it with this run's {TOKEN_VARIABLE}"

    async def generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], *, n: int = 1, prefix: Prefix | None = None
    ) -> list[Completion]:
        # vLLM searches for stop strings in the text, which it makes only when asked to detokenise.
        sampling = {**sampling, "n": n, "detokenize": bool(sampling.get("stop"))}
        return await self._ask(
            GENERATE,
            {"token_ids": prompt_ids, "sampling": sampling},
            lambda reply, version: read_completions(reply, self.model, prompt_ids, n, version, self._newest),
            n,
            prefix,
        )

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        return await self._ask(
            "/inference/v1/generate",
            {"token_ids": token_ids, "sampling_params": sampling},
            lambda reply, _: read_prompt_logprobs(reply.get("prompt_logprobs"), token_ids),
        )

    async def _ask(
        self,
        route: str,
        body: dict[str, Any],
        read: Callable[[dict[str, Any], int], Read],
        n: int = 1,
        prefix: Prefix | None = None,
    ) -> Read:
        """What `read` makes of the reply and the version that the request started from, that of its server then."""

        async def send(server: Server) -> Read:
            version, asked = server.version, {**body, "cache_salt": f"v{server.version}"}
            return await self._post(
                server, route, asked, lambda reply: read(reply, version), n=n, headers=server.headers
            )

        return await self._lasting(send, n, prefix)

    async def _probe(self, server: Server) -> None:
        await self._request("GET", server.url, "/health", timeout=PROBE_TIMEOUT, headers=server.headers)

    async def _request(self, method: str, url: str, route: str, **options: Any) -> Any:
        """As of every client. Raises TakenOver once a later run has taken over a server, whichever is asked then."""
        if not self._lost:
            options["headers"] = self.headers | options.get("headers", {})
            try:
                return await super()._request(method, url, route, **options)
            except EngineError as error:
                if error.status != TAKEN_OVER:
                    raise
                self._lost = str(error)
        raise TakenOver(self._lost)

    async def close(self) -> None:
        await self.stop_searching()
        await super().close()
