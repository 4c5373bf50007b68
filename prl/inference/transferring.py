"""New weights for the policy's servers from the trainer itself, to all of them at once.

The workers of the servers and the trainer's first rank are peers (`prl.wire.peers`) until something is
different: another server, a server started anew, or a transfer that failed. For the next one they meet again.
"""

import asyncio
import time
from typing import Any

import msgspec

from prl.errors import DeadlinePassed, EngineError
from prl.inference import lasting
from prl.inference.protocol import INTERRUPTED, RECEIVE, Incoming, Meeting, Update
from prl.inference.routing import Server
from prl.inference.updating import Updating
from prl.wire.exchange import Answer, Layout, Loaded, Order
from prl.wire.transfers import Transfers

POLL_S = 0.002
TRIES = 3
"""Transfers of a version that may fail in a row while every server says that it is well."""


class Transferring(Updating):
    """The part of a client that has servers receive weights."""

    transfers: Transfers | None = None
    """The way to the trainer; None: weights are files."""
    trainer_timeout_s = 1800.0
    """Deadline for the trainer to end a step and answer, seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._one = asyncio.Lock()
        """Held by whoever has the trainer send something."""
        self._orders = 0
        self._peers: tuple[Any, ...] = ()
        """Those of the last transfer: the address, start and number of workers of each server."""
        self._store = ""
        """Where they have met."""

    async def update_weights(self, version: int, path: str | None, timeout_s: float = 300.0) -> None:
        await super().update_weights(version, path, timeout_s)
        if self.transfers is not None:
            self.transfers.write(Loaded(self.version))

    async def _receive(self) -> None:
        give_up, tries, again = time.monotonic() + lasting.DYING_S, 0, False
        while servers := [server for server in self.servers if not server.away]:
            lives = {server: server.lives for server in servers}
            failed = await self._transfer(servers)
            tries += 1
            for server, error in failed.items():
                if error.status != INTERRUPTED and not await self._again(server, lives[server], error, give_up):
                    raise error
            if tries == TRIES and failed and all(error.status == INTERRUPTED for error in failed.values()):
                raise next(iter(failed.values()))
            if not failed:
                break
            self.counts["engine/requests_reissued"] += not again
            again = True

    async def _receive_late(self, server: Server, *, anew: bool) -> None:
        while self._newest and (anew or server.version < self._newest):
            for error in (await self._transfer([server])).values():
                raise error
            anew = False

    async def _transfer(self, servers: list[Server]) -> dict[Server, EngineError]:
        """Have the trainer send what it has to servers, which is the newest version or a later one: the newest then.

        Returns:
            Those that do not have it then, and why.

        Raises:
            DeadlinePassed: Naming a server, or the trainer.
        """
        assert self.transfers is not None
        async with self._one:
            limit_s = self._update_timeout_s
            try:
                peers = tuple([await self._peer(server) for server in servers])
            except _Failed as failed:
                return {failed.server: failed.error}
            self._orders += 1
            if peers != self._peers or self.transfers.is_off(self._store):
                self._peers, self._store = peers, self.transfers.store(self._orders)
            workers = [peer[2] for peer in peers]
            try:
                order = Order(self._orders, self._store, 1 + sum(workers), limit_s)
                self._newest = await self._answered(order)
                found = await asyncio.gather(
                    *(
                        self._received(server, order, 1 + sum(workers[:place]), self._newest)
                        for place, server in enumerate(servers)
                    ),
                    return_exceptions=True,
                )
            except BaseException:
                self.transfers.call_off(self._store)
                raise
        for error in found:
            if error is not None and not isinstance(error, EngineError):
                raise error
        return {server: error for server, error in zip(servers, found, strict=True) if isinstance(error, EngineError)}

    async def _received(self, server: Server, order: Order, offset: int, version: int) -> None:
        """Have a server receive `version`; its workers are the peers from `offset` on."""
        assert self.transfers is not None
        layout = self.transfers.read(Layout)
        assert layout is not None  # it is there before the trainer's first version is
        update = Update(layout.tensors, layout.bucket_bytes, order.timeout_s)
        meeting = Meeting(order.store, order.world_size, offset, order.timeout_s)
        body = msgspec.to_builtins(Incoming(version, meeting, update))
        try:
            await self._loaded(server, RECEIVE, body, version, order.timeout_s)
        except BaseException:  # the others need not wait for it
            self.transfers.call_off(order.store)
            raise

    async def _peer(self, server: Server) -> tuple[str, str | None, int]:
        """What a server is among peers: its address, its start and its number of workers."""
        try:
            async with asyncio.timeout(lasting.DYING_S):
                reply = await self._request("POST", server.url, RECEIVE, json={})
            return server.url, reply["instance"], int(reply["workers"])
        except TimeoutError:
            raise DeadlinePassed(f"{server.url}{RECEIVE} did not answer within {lasting.DYING_S:g} s") from None
        except (KeyError, TypeError, ValueError) as error:
            raise _Failed(server, EngineError(f"{server.url}{RECEIVE} does not say what it is: {error}")) from error
        except EngineError as error:
            raise _Failed(server, error) from error

    async def _answered(self, order: Order) -> int:
        """Have the trainer take part in a transfer, between two steps. Returns the version that it has."""
        assert self.transfers is not None
        self.transfers.write(order)
        try:
            async with asyncio.timeout(self.trainer_timeout_s):
                answer = self.transfers.read(Answer)
                while answer is None or answer.number != order.number:
                    await asyncio.sleep(POLL_S)
                    answer = self.transfers.read(Answer)
        except TimeoutError:
            raise DeadlinePassed(
                f"the trainer did not begin to send its weights within {self.trainer_timeout_s:g} s "
                "(orchestrator.policy_timeout_s)"
            ) from None
        return answer.version


class _Failed(Exception):
    """A server that cannot be asked what it is."""

    def __init__(self, server: Server, error: EngineError):
        super().__init__(str(error))
        self.server, self.error = server, error
