"""Which server of a model a request goes to: by load, and by which one has what its prompt begins with in its cache."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prl.errors import PrlError

AVOID_S = 5.0
"""A server that failed to answer is avoided for this long while another can take the request."""
BUSIER, FEW = 1.25, 16
"""A request follows its prefix to a server unless that has more than so many times the mean load, and `FEW` sequences.

Elsewhere the whole prompt is computed again. The most that load can cost is a step that takes as long as it has
sequences: then the busiest server is a quarter slower than if all had the same. With few sequences the time of a step
is that of reading the weights, and hardly depends on their number."""
REMEMBERED = 16384
"""Prefixes whose server is known, at most."""


class Prefix(NamedTuple):
    """Names of what a prompt begins with, each the same for all requests that have it in common."""

    group: str
    """The opening of the group's rollouts."""
    conversation: str
    """All that was said before in this conversation."""


@dataclass(eq=False)
class Server:
    """One server of a model, as its client sees it."""

    url: str
    """Without `/v1`."""
    version: int = 0
    """Policy version that it holds; stays 0 for a frozen model."""
    instance: str | None = None
    """What the server calls itself until it is started anew; None = it has not said so yet."""
    restart_s: float = 0.0
    """How long requests wait for it where it is away, seconds: as its start may take; 0 = nobody starts it again."""
    loading: bool = False
    """Whether it is loading weights."""
    away: bool = False
    """Whether it left the rotation: it died, or does not hold the policy."""
    lives: int = 1
    """How often it has come into the rotation."""
    error: PrlError | None = field(default=None, repr=False)
    """Why it could not come back, when that was tried last; None = it has not been tried."""
    failed_at: float = float("-inf")
    """When it last failed to answer, on the monotonic clock."""

    @property
    def headers(self) -> dict[str, str]:
        """Of a request that it refuses with `ANOTHER_INSTANCE` once it was started anew."""
        return {} if self.instance is None else {"If-Match": self.instance}

    @property
    def open(self) -> bool:
        """Whether it may be sent a request."""
        return not self.away and not self.loading

    @property
    def stays_away(self) -> bool:
        """Whether requests wait for it no longer."""
        return self.away and time.monotonic() - self.failed_at > self.restart_s

    @property
    def avoided(self) -> bool:
        """Whether it has just failed."""
        return time.monotonic() - self.failed_at < AVOID_S

    def failed(self) -> None:
        """It has failed to answer just now."""
        self.failed_at = time.monotonic()


class Router:
    """Chooses among the servers of a model."""

    def __init__(self, servers: Sequence[Server], load: Mapping[str, int]):
        """`load` is the number of sequences that each server has been asked for and has not answered, by its URL."""
        self.servers, self.load = servers, load
        self._seen: dict[str, tuple[Server, int]] = {}
        """Who has computed a prefix last, and under which policy version, oldest first: an update clears the caches."""

    def choose(self, n: int = 1, prefix: Prefix | None = None) -> Server | None:
        """The server for a request of `n` continuations; None while none may be sent one."""
        if len(self.servers) == 1:
            return self.servers[0] if self.servers[0].open else None
        ready = [server for server in self.servers if server.open]
        if not ready:
            return None
        best = min(ready, key=lambda server: (server.avoided, self.load[server.url]))
        if prefix is None:
            return best
        limit = max(FEW, BUSIER * (sum(self.load[server.url] for server in ready) + n) / len(ready))
        for name in (prefix.conversation, prefix.group):
            server, version = self._seen.get(name, (best, -1))
            warm = server.version == version and server.open and not server.avoided
            if warm and self.load[server.url] + n <= limit:
                best = server
                break
        for name in prefix:
            self._seen.pop(name, None)
            self._seen[name] = best, best.version
        while len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return best
