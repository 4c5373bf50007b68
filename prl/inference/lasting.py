"""Requests that outlast the server they were sent to, where somebody starts it again."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prl.errors import EngineError, RequestAborted

DYING_S = 30.0
"""A server whose engine has died takes up to this long to end, on a loaded machine, seconds."""
PAUSE_S = 0.1
Answer = TypeVar("Answer")


class Lasting(ABC):
    """The part of a client that knows how often its servers have been started.

    Whoever starts a server again calls `pause` when it has died and `revive` when its successor runs. In between no
    request is sent; those that failed meanwhile are sent again then.
    """

    urls: list[str]

    def __init__(self) -> None:
        self.restartable = False
        """Whether a server that dies is going to be started again."""
        self.counts: Counter[str] = Counter({"engine/restarts": 0, "engine/requests_reissued": 0})
        """Metrics since the run began."""
        self.failed_at: dict[str, float] = {}
        """When a server last failed to answer, on the monotonic clock."""
        self._serving = asyncio.Event()
        """Set but while a server is being started again."""
        self._serving.set()
        self._lives = 1
        """How often the servers have been started."""

    def pause(self) -> None:
        """Have requests wait until `revive` is through: the server is being started again."""
        self._serving.clear()

    async def revive(self, timeout_s: float, still_alive: Callable[[], None]) -> None:
        """Wait until a server that was started again can answer, and let requests flow again.

        Arguments and errors as of `wait_ready`.
        """
        await self.wait_ready(timeout_s, still_alive)
        await self._restore(timeout_s)
        self.failed_at.clear()
        self._lives += 1
        self._serving.set()

    @abstractmethod
    async def wait_ready(self, timeout_s: float, still_alive: Callable[[], None]) -> None:
        """Wait until every server can answer."""

    async def _restore(self, timeout_s: float) -> None:  # noqa: B027
        """Bring servers that have just been started to where the dead ones were."""

    @abstractmethod
    async def _probe(self, url: str) -> None:
        """Raise EngineError unless the server can answer now."""

    async def _lasting(self, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `send` returns, called again where a server has died meanwhile and was started again.

        A server that gives requests up is about to end, and may answer questions until it has: what it gave up is sent
        again at once, to it or to its successor.
        """
        give_up: float | None = None
        while True:
            await self._serving.wait()
            lives = self._lives
            try:
                return await send()
            except EngineError as error:
                now = time.monotonic()
                give_up = give_up or now + DYING_S
                if isinstance(error, RequestAborted) and now < give_up:
                    await asyncio.sleep(PAUSE_S)
                elif not (error.of_server and await self._revived(lives)):
                    raise
                self.counts["engine/requests_reissued"] += 1

    async def _revived(self, lives: int) -> bool:
        """Whether the servers have been started again since they were for the time `lives`; waits until that is known.

        False where all of them answer, so that a failure was the request's own, or where nobody starts them again.
        """
        give_up = time.monotonic() + DYING_S
        while self._lives == lives:
            if not self._serving.is_set():
                await self._serving.wait()  # whoever starts it has a deadline
                continue
            if not self.restartable:
                return False
            try:
                await asyncio.gather(*map(self._probe, self.urls))
                return self._lives > lives
            except EngineError:
                if time.monotonic() > give_up:
                    return False
                await asyncio.sleep(PAUSE_S)
        return True
