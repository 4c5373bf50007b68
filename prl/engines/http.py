"""HTTP requests to the servers of one model."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import msgspec
import tenacity

from prl.base.errors import UNREADABLE, DeadlinePassed, EngineError, RequestAborted
from prl.engines.protocol import JSON, as_json
from prl.engines.replies import reading
from prl.engines.servers import Router, Server, Traffic

KEEP_ALIVE_S = 2.0
"""Seconds after which an idle connection is closed. Servers close it after 5, and a request sent just then is lost."""
CONNECT_S = 30.0
REQUEST_S = 3600.0
"""Deadline of a request that has no other, seconds."""
PROBE_S = 5.0
"""Deadline of a question that a server answers at once, seconds."""
PAUSE_S = 0.1
"""Time between two looks at whether a server is ready, seconds."""
ENDING = ("shutting down", "after shutdown")
"""Words of a server's answer once it has been asked to end; it may take ten seconds more, and say that it is well."""
ENGINE_DEAD = "EngineCore encountered an issue"
"""Words of a server's answer once its engine core has died, until it ends itself."""
SHORTEST_SECRET = 8
"""Characters of a token that an error does not repeat; a shorter one is in words."""


def closed_while_idle(error: BaseException) -> bool:
    """Return whether a request was lost with a connection that its server closed before it read the request."""
    lost = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    return lost and not isinstance(error, aiohttp.ClientConnectorError)  # nothing listens there


def is_away(error: BaseException) -> bool:
    """Return whether a server was away, not ready, or ending, so that the same request may be answered later."""
    lost = isinstance(error.__cause__, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError)
    ending = isinstance(error, RequestAborted) or ENGINE_DEAD in str(error)
    return isinstance(error, EngineError) and (lost or ending or error.status in (502, 503))


class Endpoints:
    """Connections to the servers of one model, what each is asked for at the moment, and who gets the next request."""

    def __init__(self, model: str, token: str | None, traffic: Traffic):
        """
        Args:
            model: The name that the servers serve the model under.
            token: Sent as a bearer token; None = none is sent.
            traffic: Its servers, and where requests to them are counted.
        """
        self.model, self.token = model, token
        self.traffic, self.servers = traffic, traffic.servers
        self.router = Router(self.servers)
        self._session = aiohttp.ClientSession(
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            # The engine queues requests itself; a limit on this side would only hide the queue.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S),
        )

    async def post(
        self, server: Server, route: str, body: dict[str, Any], *, n: int = 1, timeout_s: float | None = None
    ) -> Any:
        """A server's reply to a request about the model, for `n` sequences.

        Raises:
            RequestAborted: The server gave the request up: what was sampled by then is no completion.
            EngineError: It refused the request or failed.
        """
        asked = {"model": self.model, **body}
        try:
            with self.traffic.request(server, n):
                reply = await self.request(
                    "POST", server.url, route, asked, headers=server.headers, timeout_s=timeout_s
                )
                with reading(f"{server.url}{route}"):
                    aborted = any(choice.get("finish_reason") == "abort" for choice in reply.get("choices", ()))
                # What has been sampled of it is no reply: to train on it would be silently wrong.
                if aborted:
                    raise RequestAborted(f"{server.url} gave a request up before its end, as one that is about to end")
        except EngineError as error:
            if error.of_server:
                server.failed()
            raise
        return reply

    @contextlib.contextmanager
    def reading(self, server: Server, route: str) -> Iterator[None]:
        """Have a fault of a reply raise an EngineError that names the server, which is avoided for a while."""
        try:
            with reading(f"{server.url}{route}"):
                yield
        except EngineError:
            server.failed()
            raise

    async def request(
        self,
        method: str,
        url: str,
        route: str,
        body: dict[str, Any] | None = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """The decoded JSON of a reply. Raises EngineError for anything but HTTP 200 with JSON."""
        options: dict[str, Any] = {"headers": headers or {}}
        if body is not None:
            options = {"data": as_json(body), "headers": JSON | options["headers"]}
        if timeout_s is not None:
            options["timeout"] = aiohttp.ClientTimeout(total=timeout_s)
        try:
            return await self._send(method, url, route, options)
        except TimeoutError as error:
            # The deadline of a connection says what it waited for; that of the whole request has no words.
            reason = str(error) or f"timeout, no answer within {timeout_s or REQUEST_S:g} s"
            raise EngineError(f"{url}{route} failed: {reason}") from error
        except (aiohttp.ClientError, *UNREADABLE) as error:
            raise EngineError(f"{url}{route} failed: {str(error) or type(error).__name__}") from error

    # Requests are idempotent. A server that closed one idle connection has closed others too: the pause before the
    # third try lets us notice.
    @tenacity.retry(
        retry=tenacity.retry_if_exception(closed_while_idle),
        stop=tenacity.stop_after_attempt(3),
        wait=tenacity.wait_incrementing(start=0.0, increment=0.1),
        reraise=True,
    )
    async def _send(self, method: str, url: str, route: str, options: dict[str, Any]) -> Any:
        # A redirect would take the token and the prompt to whoever is named there.
        async with self._session.request(method, url + route, allow_redirects=False, **options) as reply:
            return await content_of(reply, f"{url}{route}", self.token)

    async def wait_ready(
        self,
        probe: Callable[[Server], Awaitable[None]],
        credentials: str,
        timeout_s: float,
        still_alive: Callable[[], None] = lambda: None,
        *,
        again: bool = False,
    ) -> None:
        """Wait until every server can answer.

        Args:
            probe: Raises EngineError unless a server can answer now.
            credentials: What a server may refuse us for, and the setting that it comes from.
            timeout_s: Deadline for all of them, seconds.
            still_alive: Called before each try; what it raises ends the wait early.
            again: The model went away: one of its servers is enough, and one that refuses the token may stop doing so.

        Raises:
            DeadlinePassed: Naming the servers that did not answer.
            EngineError: At once, where a server refuses the token.
        """
        silent, last = deque(self.servers), "no answer"
        enough = len(self.servers) - 1 if again else 0
        try:
            async with asyncio.timeout(timeout_s):
                while len(silent) > enough:
                    still_alive()
                    try:
                        await probe(silent[0])
                        silent.popleft()
                    except EngineError as error:
                        # A wrong token stays wrong: to wait for the deadline would hide the cause.
                        if error.status in (401, 403) and not again:
                            raise EngineError(f"{silent[0].url} refused {credentials}", error.status) from None
                        last = str(error)
                        # The next one is asked first, so that one dead server does not hide which others are ready.
                        silent.rotate(-1)
                        await asyncio.sleep(max(PAUSE_S, error.wait_s or 0.0))
        except TimeoutError:
            state = "away for" if again else "not ready after"
            urls = ", ".join(server.url for server in silent)
            raise DeadlinePassed(f"model {self.model!r} at {urls} was {state} {timeout_s:g} s ({last})") from None

    def address(self, number: int) -> str:
        """The URL of a server for requests that another client sends; `number` chooses among those that are open."""
        ready = [server for server in self.servers if server.open] or self.servers
        return ready[number % len(ready)].url

    async def close(self) -> None:
        await self._session.close()


async def content_of(reply: aiohttp.ClientResponse, where: str, token: str | None) -> Any:
    """The decoded JSON of the reply of `where`. Raises EngineError, without the token, for any but HTTP 200."""
    body = await reply.read()
    if reply.status == 200:
        return msgspec.json.decode(body or b"{}")
    # A server may quote the whole request in its error, token and prompt included.
    text = body[:2000].decode(errors="replace")
    text = (text.replace(token, "***") if token and len(token) >= SHORTEST_SECRET else text)[:500]
    if 300 <= reply.status < 400:
        text = f"it leads to {reply.headers.get('Location', 'nowhere')[:200]}, which is not followed: {text}"
    ending = reply.status >= 500 and any(words in text.lower() for words in ENDING)
    kind = RequestAborted if ending else EngineError
    wait_s = None
    with contextlib.suppress(KeyError, ValueError):
        wait_s = max(float(reply.headers["Retry-After"]), 0.0)
    raise kind(f"{where} answered HTTP {reply.status}: {text}", reply.status, wait_s)
