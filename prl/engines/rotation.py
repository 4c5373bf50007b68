"""The rotation of the live policy's servers: who leaves, who comes back, and what becomes of requests meanwhile."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from prl.base.errors import DeadlinePassed, EngineError, RequestAborted
from prl.engines.protocol import ANOTHER_INSTANCE
from prl.engines.servers import Router, Server

log = logging.getLogger(__name__)

DYING_S = 30.0
"""A server whose engine has died takes up to this long to end, on a loaded machine, seconds."""
PAUSE_S = 0.1
LOOK_S = 0.5
"""Time between two looks at whether a server that left is back, seconds."""
Answer = TypeVar("Answer")


class Rotation:
    """The servers that get requests.

    A server that dies leaves, and what it was asked for is sent to others. It is looked for, and comes back as soon as
    it answers and has the weights of then. Where none is left, requests wait for one that is started again, for as long
    as its start may take, and fail if none is.
    """

    def __init__(
        self,
        servers: Sequence[Server],
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
        self._searches: set[asyncio.Task[None]] = set()
        """For servers that left."""

    # --- requests ---

    async def send(self, send: Callable[[Server], Awaitable[Answer]], n: int = 1, prefix: str | None = None) -> Answer:
        """Return what `send` returns for a server of the rotation, called again where that one is lost meanwhile."""
        give_up = None
        while True:
            server = await self.free(n, prefix)
            # Of now: a server that has come back by the time of an error has nothing to do with it.
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

    async def free(self, n: int = 1, prefix: str | None = None) -> Server:
        """Wait for a server that may be sent a request. Raises EngineError where none is going to be there."""
        while (server := self._router.choose(n, prefix)) is None:
            errors = [each.error for each in self.servers if each.error is not None and each.stays_away]
            # Only where every one is given up. A server that may still come back is worth waiting for.
            if len(errors) == len(self.servers):
                raise errors[0]
            await self._changed.wait()
        return server

    async def lost(self, server: Server, lives: int, error: EngineError) -> bool:
        """Return whether what a server failed at with `error` is to be sent again. The server has left the rotation
        then.

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
        if server.lives == lives:  # else it has come back since
            self.leave(server, error)
        # It may say that it is well until it has ended: without a pause its requests would come back to it at once.
        if isinstance(error, RequestAborted):
            await asyncio.sleep(PAUSE_S)
        return True

    # --- the rotation ---

    def leave(self, server: Server, error: EngineError) -> None:
        """Take a server out of the rotation; it comes back as soon as it can."""
        if server.away:
            return
        server.away, server.error = True, None
        server.failed()
        # With a restart to come it is no news for the user: the supervisor says more.
        log.log(logging.INFO if server.restart_s else logging.WARNING, "%s gets no requests now: %s", server.url, error)
        search = asyncio.create_task(self._search(server))
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)
        self.notify()

    def restarted(self, servers: Sequence[Server], url: str) -> None:
        """Count that an engine was started again. Those of its `servers` that are in this rotation have a new `url`."""
        self.counts["engine/restarts"] += 1
        for server in servers:
            server.url = url

    async def _search(self, server: Server) -> None:
        """Take a server back into the rotation once it answers and has the current weights, however long it takes."""
        while server.away:
            try:
                await self._catch_up(server, await self._runs_anew(server))
                server.away, server.error = False, None
                server.lives += 1
                log.info("%s answers again, with policy version %d", server.url, server.version)
            except (EngineError, DeadlinePassed) as error:
                server.error = error if isinstance(error, EngineError) else EngineError(str(error))
            self.notify()
            if server.away:
                await asyncio.sleep(LOOK_S)

    async def _runs_anew(self, server: Server) -> bool:
        """Return whether a server was restarted since it loaded weights. Raises EngineError where
        it gives no answer."""
        try:
            await self._probe(server)
        except EngineError as error:
            if error.status != ANOTHER_INSTANCE:
                raise
            return True
        return False

    def notify(self) -> None:
        """Have whoever waits for a server look again."""
        # Everybody who waits has this event. Those who come later wait for the next one.
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Look for no server any more."""
        searches = list(self._searches)
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
