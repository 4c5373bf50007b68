"""New weights for the servers of the live policy, each at its own moment."""

import asyncio
import time
from abc import abstractmethod
from typing import Any

import aiohttp

from prl.errors import DeadlinePassed, EngineError
from prl.inference import lasting
from prl.inference.lasting import Lasting
from prl.inference.protocol import RUN, WHOSE, run_name
from prl.inference.routing import Server
from prl.inference.traffic import Traffic

UPDATE = "/prl/load_policy"
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5)
"""For a question that a server answers at once."""


class Updating(Lasting):
    """The part of a client that has servers load weights.

    They load at the same time, and each is sent requests again once it has done so. One that is away loads the newest
    weights when it comes back.
    """

    traffic: Traffic
    headers: dict[str, str]
    """With the name that servers know this client by from its first weights on."""

    def __init__(self) -> None:
        super().__init__()
        self.version: int = 0
        """Policy version of all servers in the rotation; while they load another, some may have that already."""
        self._newest = 0
        self._path: str | None = None
        """Where the weights of the newest version are; None = the servers began with them."""
        self._updating = asyncio.Lock()
        self._update_timeout_s = 300.0

    @property
    def loading(self) -> int | None:
        """The version that is being loaded."""
        return self._newest if self._updating.locked() else None

    @abstractmethod
    async def _request(self, method: str, url: str, route: str, **options: Any) -> Any:
        """The decoded JSON of the reply. Raises EngineError for anything but HTTP 200 with JSON."""

    async def update_weights(self, version: int, path: str, timeout_s: float = 300.0) -> None:
        """Load new weights into every server; one that dies of it, or was away, loads them when it is back.

        Running requests are kept and continue under the new weights. No cached prefix of an older version survives.

        Args:
            version: The policy version of the weights.
            path: Their safetensors folder.
            timeout_s: Upper bound of the deadline for each server, seconds.

        Raises:
            DeadlinePassed, EngineError: Naming the server. Other servers may hold the new version then.
            TakenOver: Likewise, where a later run has begun with it.
        """
        async with self._updating:
            self._newest, self._path, self._update_timeout_s = version, path, timeout_s
            if not self.headers:
                self.headers = {RUN: run_name(await asyncio.gather(*map(self._whose, self.servers)))}
            await asyncio.gather(*(self._update(server) for server in self.servers if not server.away))
            await self._free()
            self.version = version

    async def _whose(self, server: Server) -> object:
        """The name of the run whose weights a server has; None where it does not say, as loading will then."""
        try:
            reply = await self._request("GET", server.url, WHOSE, timeout=PROBE_TIMEOUT)
        except EngineError:
            return None
        return reply.get("run") if isinstance(reply, dict) else None

    async def _update(self, server: Server) -> None:
        """Have a server of the rotation load the newest version; one that dies meanwhile will when it comes back."""
        give_up, lives, again = time.monotonic() + lasting.DYING_S, server.lives, False
        while not server.away:
            try:
                return await self._load(server)
            except EngineError as error:
                if not await self._again(server, lives, error, give_up):
                    raise
                self.counts["engine/requests_reissued"] += not again
                again = True

    async def _catch_up(self, server: Server, *, anew: bool) -> None:
        while self._path is not None and (anew or server.version != self._newest):
            version = self._newest
            try:
                await self._load(server)
                anew = False
            except EngineError:
                if version == self._newest:  # else these weights may be gone by now
                    raise

    async def _load(self, server: Server) -> None:
        """Have a server load the newest version, with no request sent to it meanwhile."""
        version, limit_s = self._newest, self._update_timeout_s
        server.loading = True
        try:
            with self.traffic.loading(server.url, version):
                async with asyncio.timeout(limit_s):
                    reply = await self._request("POST", server.url, UPDATE, json={"path": self._path})
            if not (isinstance(reply, dict) and "loaded" in reply):
                raise EngineError(f"{server.url}{UPDATE} does not say that policy version {version} is loaded")
            instance = reply.get("instance")
            server.version, server.instance = version, instance if isinstance(instance, str) else None
        except TimeoutError:
            raise DeadlinePassed(f"{server.url} did not load policy version {version} within {limit_s:g} s") from None
        finally:
            server.loading = False
            self._notify()
