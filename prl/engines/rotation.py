"""Which servers of the live policy get requests: who leaves, who comes back, and what becomes of requests meanwhile."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prl.engines.routing import Prefix, Router, Server
from prl.engines.vllm.server import ANOTHER_INSTANCE
from prl.errors import DeadlinePassed, EngineError, RequestAborted

log = logging.getLogger(__name__)

DYING_S = 30.0
"""A server whose engine has died takes up to this long to end, on a loaded machine, seconds."""
PAUSE_S = 0.1
LOOK_S = 0.5
"""Time between two looks at whether a server that left is back, seconds."""
Answer = TypeVar("Answer")


class Rotation:
    """The servers that get requests.

    A server that dies leaves, and what it was asked for is sent to others. It comes back as soon as it answers and has
    the weights of then. Whoever starts it again calls `pause` when it has died and `revive` when its successor runs;
    one that nobody of ours starts is looked for. Where none is left, requests wait for one that is being started again,
    and fail if none is.
    """

    def __init__(
        self,
        servers: list[Server],
        router: Router,
        probe: Callable[[Server], Awaitable[None]],
        catch_up: Callable[[Server, bool], Awaitable[None]],
    ):
        """
        Args:
            servers: All of them, at first in the rotation.
            router: Chooses among them.
            probe: Raises EngineError unless a server can answer now: `ANOTHER_INSTANCE` where it was started anew.
            catch_up: Has a server load the current weights, unless it has them and, says the second argument, was not
                started anew.
        """
        self.servers, self.counts = servers, Counter({"engine/restarts": 0, "engine/requests_reissued": 0})
        self._router, self._probe, self._catch_up = router, probe, catch_up
        self._changed = asyncio.Event()
        """Set, and replaced, when a server may have come into the rotation or cannot."""
        self._searches: dict[Server, asyncio.Task[None]] = {}
        """For servers that left and that nobody of ours starts."""

    # --- whoever starts servers again ---

    def pause(self, url: str) -> None:
        """Have no request sent to a server until `revive` is through: it is being started again."""
        server = self._at(url)
        if server in self._searches:
            self._searches.pop(server).cancel()
        server.away = server.restarting = True
        self.notify()

    async def revive(self, url: str, timeout_s: float) -> None:
        """Take a server that was started again back into the rotation, once it answers and has the weights.

        Raises DeadlinePassed where it does not answer within `timeout_s`, EngineError where it does not load.
        """
        server, last = self._at(url), "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._runs_anew(server)
                        break
                    except EngineError as error:
                        last = str(error)
                        await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            raise DeadlinePassed(f"the server at {url} was away for {timeout_s:g} s ({last})") from None
        await self._catch_up(server, True)
        self._enter(server)

    # --- requests ---

    async def send(
        self, send: Callable[[Server], Awaitable[Answer]], n: int = 1, prefix: Prefix | None = None
    ) -> Answer:
        """What `send` returns for a server of the rotation, called again where that one is lost meanwhile."""
        give_up = None
        while True:
            server = await self.free(n, prefix)
            lives = server.lives
            try:
                return await send(server)
            except EngineError as error:
                first = give_up is None
                give_up = give_up or time.monotonic() + DYING_S
                # A server that is about to end may say that it is well, and come back, until it has ended.
                late = isinstance(error, RequestAborted) and time.monotonic() > give_up
                if late or not await self.lost(server, lives, error):
                    raise
                self.counts["engine/requests_reissued"] += first

    async def free(self, n: int = 1, prefix: Prefix | None = None) -> Server:
        """Wait for a server that may be sent a request. Raises EngineError where none is going to be there."""
        while (server := self._router.choose(n, prefix)) is None:
            errors = [each.error for each in self.servers if each.error is not None and self._stays_away(each)]
            if len(errors) == len(self.servers):
                raise errors[0]
            await self._changed.wait()
        return server

    async def lost(self, server: Server, lives: int, error: EngineError) -> bool:
        """Whether what a server failed at with `error` is to be sent again. The server has left the rotation then.

        Not where it is well, so that the failure was the request's own. `lives` is that of the server when it was sent.
        """
        ended = isinstance(error, RequestAborted) or error.status == ANOTHER_INSTANCE
        if not ended and not error.of_server:
            return False
        if not ended and not server.away and server.lives == lives:
            try:
                await self._probe(server)
                return server.lives > lives
            except EngineError as silent:
                if not silent.of_server and silent.status != ANOTHER_INSTANCE:  # it has answered
                    return False
                error = silent
        self._leave(server, lives, error)
        if isinstance(error, RequestAborted):
            await asyncio.sleep(PAUSE_S)
        return True

    # --- the rotation ---

    def _at(self, url: str) -> Server:
        return next(server for server in self.servers if server.url == url)

    def _stays_away(self, server: Server) -> bool:
        """Whether a server is away and nobody starts it again; one that may be has been given time to be seen dead."""
        waited = not server.restartable or time.monotonic() - server.failed_at > DYING_S
        return server.away and not server.restarting and waited

    def _leave(self, server: Server, lives: int, error: EngineError) -> None:
        """Take a server out of the rotation, unless it has come back since; it comes back as soon as it can."""
        if server.away or server.lives != lives:
            return
        server.away, server.error = True, None
        server.failed()
        level = logging.INFO if server.restartable else logging.WARNING
        log.log(level, "%s gets no requests now: %s", server.url, error)
        self._searches[server] = asyncio.create_task(self._search(server))
        self.notify()

    async def _search(self, server: Server) -> None:
        """Take a server back into the rotation once it answers and has the current weights, however long it takes."""
        while True:
            try:
                await self._catch_up(server, await self._runs_anew(server))
                self._enter(server)
                log.info("%s answers again, with policy version %d", server.url, server.version)
                return
            except (EngineError, DeadlinePassed) as error:
                server.error = error if isinstance(error, EngineError) else EngineError(str(error))
                self.notify()
                await asyncio.sleep(LOOK_S)

    async def _runs_anew(self, server: Server) -> bool:
        """Whether a server was started anew since it loaded weights. Raises EngineError where it does not answer."""
        try:
            await self._probe(server)
        except EngineError as error:
            if error.status != ANOTHER_INSTANCE:
                raise
            return True
        return False

    def _enter(self, server: Server) -> None:
        self._searches.pop(server, None)
        server.away = server.restarting = False
        server.error = None
        server.lives += 1
        self.notify()

    def notify(self) -> None:
        """Have whoever waits for a server look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Look for no server any more."""
        searches = list(self._searches.values())
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
