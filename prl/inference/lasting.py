"""The rotation of a live model's servers: who leaves it, who comes back, and what becomes of the requests meanwhile."""

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prl.errors import DeadlinePassed, EngineError, RequestAborted, TakenOver
from prl.inference.routing import Prefix, Router, Server
from prl.inference.server import ANOTHER_INSTANCE

log = logging.getLogger(__name__)

DYING_S = 30.0
"""A server whose engine has died takes up to this long to end, on a loaded machine, seconds."""
PAUSE_S = 0.1
LOOK_S = 0.5
"""Time between two looks at whether a server that left is back, seconds."""
Answer = TypeVar("Answer")


class Lasting(ABC):
    """Requests that outlast the server that they were sent to.

    A server that dies leaves the rotation, and its requests are sent to others. It comes back, with the weights of
    then, as soon as it answers. Whoever starts it again calls `pause` when it has died and `revive` when its successor
    runs; one that nobody of ours starts is looked for. Where none is left, requests wait for one that is being started
    again, and fail if none is.

    Invariant: a server in the rotation holds the version that is on record for it, and is asked for nothing while it
    loads another.
    """

    servers: list[Server]
    router: Router

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter({"engine/restarts": 0, "engine/requests_reissued": 0})
        """Metrics since the run began."""
        self._changed = asyncio.Event()
        """Set, and replaced, when a server may have come into the rotation or cannot."""
        self._searches: dict[Server, asyncio.Task[None]] = {}
        """For servers that left and that nobody of ours starts."""

    # --- what a client does for one server ---

    @abstractmethod
    async def _probe(self, server: Server) -> None:
        """Raise EngineError unless the server can answer now: `ANOTHER_INSTANCE` where it was started anew."""

    @abstractmethod
    async def _catch_up(self, server: Server, *, anew: bool) -> None:
        """Have a server that is not in the rotation load the current weights, unless it has them and is not `anew`."""

    # --- whoever starts servers again ---

    def pause(self, url: str) -> None:
        """Have no request sent to a server until `revive` is through: it is being started again."""
        server = self._at(url)
        if (search := self._searches.pop(server, None)) is not None:
            search.cancel()
        server.away = server.restarting = True
        self._notify()

    def give_up(self, url: str) -> None:
        """Send a server nothing any more: it died, and nobody starts it again."""
        self.pause(url)
        server = self._at(url)
        server.restarting = server.restartable = False
        server.gone, server.error = True, EngineError(f"{url} has died, and is not started again")

    async def revive(self, url: str, timeout_s: float) -> None:
        """Take a server that was started again back into the rotation, once it answers and has the weights.

        Args:
            url: Its address.
            timeout_s: Deadline for it to answer, seconds.

        Raises:
            DeadlinePassed: Naming the server.
            EngineError: It does not load the weights.
        """
        server, last = self._at(url), "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._probe(server)
                        break
                    except EngineError as error:
                        if error.status == ANOTHER_INSTANCE:
                            break
                        last = str(error)
                        await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            raise DeadlinePassed(f"the server at {url} was away for {timeout_s:g} s ({last})") from None
        await self._catch_up(server, anew=True)
        self._enter(server)

    # --- requests ---

    async def _lasting(
        self, send: Callable[[Server], Awaitable[Answer]], n: int = 1, prefix: Prefix | None = None
    ) -> Answer:
        """What `send` returns for a server of the rotation, called again where that one has died meanwhile."""
        give_up: float | None = None
        while True:
            server = self.router.choose(n, prefix) or await self._free(n, prefix)
            lives = server.lives
            try:
                return await send(server)
            except EngineError as error:
                first, give_up = give_up is None, give_up or time.monotonic() + DYING_S
                if not await self._again(server, lives, error, give_up):
                    raise
                self.counts["engine/requests_reissued"] += first

    async def _free(self, n: int = 1, prefix: Prefix | None = None) -> Server:
        """Wait for a server that may be sent a request. Raises EngineError where none is going to be there, TakenOver
        where that is why."""
        while (server := self.router.choose(n, prefix)) is None:
            lost = [each.error for each in self.servers if each.error is not None and self._is_lost(each)]
            if len(lost) == len(self.servers):
                raise lost[0]
            await self._changed.wait()
        return server

    async def _again(self, server: Server, lives: int, error: EngineError, give_up: float) -> bool:
        """Whether what a server failed at is to be sent again, to it or to another; waits until that is known.

        Not where the server is well, so that the failure was the request's own, and not where it is the only one and
        nobody starts it again. One that gives requests up is about to end, and may say that it is well until it has.

        Args:
            server: Where it was sent.
            lives: Of that server, when it was sent.
            error: How it failed.
            give_up: When a server that gives requests up, or is another each time, has had time enough, on the
                monotonic clock.
        """
        if error.status == ANOTHER_INSTANCE:
            self._leave(server, lives, error)
            return time.monotonic() < give_up
        if isinstance(error, RequestAborted):
            if self._others(server):
                self._leave(server, lives, error)
            else:
                await asyncio.sleep(PAUSE_S)
            return time.monotonic() < give_up
        if not error.of_server:
            return False
        give_up = time.monotonic() + DYING_S
        while server.lives == lives and not server.away:
            if not (self._others(server) or server.restartable):
                return False
            try:
                await self._probe(server)
                return server.lives > lives
            except EngineError as silent:
                if not silent.of_server and silent.status != ANOTHER_INSTANCE:  # it has answered
                    return server.lives > lives
                if self._others(server) or silent.status == ANOTHER_INSTANCE:
                    self._leave(server, lives, silent)
                elif time.monotonic() > give_up:
                    return False
                else:
                    await asyncio.sleep(PAUSE_S)
        return True

    # --- the rotation ---

    def _at(self, url: str) -> Server:
        return next(server for server in self.servers if server.url == url)

    def _others(self, server: Server) -> bool:
        """Whether another server is in the rotation, if only to load weights at the moment."""
        return any(not each.away for each in self.servers if each is not server)

    def _is_lost(self, server: Server) -> bool:
        """Whether a server is away and nobody starts it again; one that may be has been given time to be seen dead."""
        waited = not server.restartable or time.monotonic() - server.failed_at > DYING_S
        return server.away and not server.restarting and waited

    def _leave(self, server: Server, lives: int, error: EngineError) -> None:
        """Take a server out of the rotation, unless it has come back since; it comes back as soon as it can."""
        if server.away or server.lives != lives:
            return
        server.away, server.error = True, None
        server.failed()
        log.log(
            logging.INFO if server.restartable else logging.WARNING, "%s gets no requests now: %s", server.url, error
        )
        self._searches[server] = asyncio.create_task(self._search(server))
        self._notify()

    async def _search(self, server: Server) -> None:
        """Take a server back into the rotation once it answers and holds the current weights, however long it takes."""
        while True:
            try:
                anew = False
                try:
                    await self._probe(server)
                except EngineError as error:
                    if error.status != ANOTHER_INSTANCE:
                        raise
                    anew = True
                await self._catch_up(server, anew=anew)
                self._enter(server)
                log.info("%s answers again, with policy version %d", server.url, server.version)
                return
            except (EngineError, DeadlinePassed, TakenOver) as error:
                server.error = EngineError(str(error)) if isinstance(error, DeadlinePassed) else error
                self._notify()
                await asyncio.sleep(LOOK_S)

    def _enter(self, server: Server) -> None:
        self._searches.pop(server, None)
        server.away = server.restarting = False
        server.error = None
        server.lives += 1
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def stop_searching(self) -> None:
        """Look for no server any more."""
        searches = list(self._searches.values())
        for search in searches:
            search.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*searches, return_exceptions=True)
