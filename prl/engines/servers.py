"""The servers of one model: what each is asked for at the moment, and which a request goes to, by prefix and load."""

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prl.base.errors import PrlError
from prl.transport.events import ENGINE, GENERATING, LOADING, Track

AVOID_S = 5.0
"""A server that failed to answer is avoided for this long while another can take the request."""
BUSIER, FEW = 1.25, 16
"""A request follows its prefix to a server unless that has more than so many times the mean load, and `FEW` sequences.

Elsewhere the whole prompt is computed again. The most that load can cost is a step that takes as long as it has
sequences: then the busiest server is a quarter slower than if all had the same. With few sequences the time of a step
is that of reading the weights, and hardly depends on their number."""


@dataclass(eq=False)
class Server:
    """One server of a model, as its client sees it."""

    url: str
    """Without `/v1`."""
    version: int = 0
    """Policy version that it holds; stays 0 for a frozen model."""
    instance: str | None = None
    """Name that the server has until it is started anew; None = it has not said it yet."""
    restart_s: float = 0.0
    """Seconds that requests wait for it where it is away: as its start may take; 0 = nobody starts it again."""
    loading: int | None = None
    """The version whose weights it is loading; None = none."""
    in_flight: int = 0
    """Requests that it has not answered."""
    load: int = 0
    """Sequences that those ask for."""
    track: Track = field(default_factory=lambda: Track(ENGINE), repr=False)
    away: bool = False
    """It left the rotation: it died, or does not hold the policy."""
    lives: int = 1
    """Times that it has come into the rotation."""
    error: PrlError | None = field(default=None, repr=False)
    """Why it could not come back, when that was tried last; None = it has not been tried."""
    failed_at: float = float("-inf")
    """When it last failed to answer, on the monotonic clock."""

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of a request that it refuses with `ANOTHER_INSTANCE` once it was started anew."""
        return {} if self.instance is None else {"If-Match": self.instance}

    @property
    def open(self) -> bool:
        """Return whether it may be sent a request."""
        return not self.away and self.loading is None

    @property
    def stays_away(self) -> bool:
        """Return whether requests wait for it no longer."""
        return self.away and time.monotonic() - self.failed_at > self.restart_s

    @property
    def avoided(self) -> bool:
        """Return whether it has just failed."""
        return time.monotonic() - self.failed_at < AVOID_S

    def failed(self) -> None:
        """It has failed to answer just now."""
        self.failed_at = time.monotonic()

    def record(self) -> None:
        """Have its track say what it does now: load weights, or generate for the step after that of its weights."""
        if self.loading is not None:
            self.track.enter(LOADING, self.loading)
        else:
            self.track.enter(GENERATING if self.in_flight else None, self.version + 1)


class Traffic:
    """Requests in flight at each server of a model, as its track records them."""

    def __init__(self, servers: Sequence[Server]):
        self.servers = servers
        self.answered = 0
        """Requests that were answered so far."""

    def record(self, track: Track) -> None:
        """From now on, write into the file of `track`."""
        for server, name in zip(self.servers, tracks_of(len(self.servers)), strict=True):
            server.track = track.beside(name)

    @property
    def busy_s(self) -> float:
        """Seconds in which a server was at work, the mean over servers."""
        return sum(server.track.busy_s for server in self.servers) / len(self.servers)

    @contextlib.contextmanager
    def request(self, server: Server, n: int = 1) -> Iterator[None]:
        """A request for `n` sequences is in flight inside the block."""
        server.in_flight += 1
        server.load += n
        server.record()
        try:
            yield
            # Not in `finally`: what failed was not answered, and shows no progress.
            self.answered += 1
        finally:
            server.in_flight -= 1
            server.load -= n
            server.record()

    @contextlib.contextmanager
    def loading(self, server: Server, version: int) -> Iterator[None]:
        """The server loads the weights of `version` inside the block; requests in flight wait."""
        server.loading = version
        server.record()
        try:
            yield
            server.version = version
        finally:
            server.loading = None
            server.record()


def tracks_of(servers: int) -> list[str]:
    """The names of the tracks of so many servers."""
    return [ENGINE] if servers == 1 else [f"{ENGINE} {place + 1}" for place in range(servers)]


class Router:
    """Chooses among the servers of a model."""

    def __init__(self, servers: Sequence[Server]):
        self.servers = servers

    def choose(self, n: int = 1, prefix: str | None = None) -> Server | None:
        """The server for a request of `n` continuations; None while none may be sent one.

        Requests of the same `prefix` go to the same one, unless it is busier than most or has just failed.
        """
        ready = [server for server in self.servers if server.open]
        if not ready:
            return None
        if prefix is not None:
            # Each prefix ranks all servers: where one leaves, only its own prefixes move (rendezvous hashing).
            home = max(ready, key=lambda server: zlib.crc32(f"{prefix} {server.url}".encode()))
            limit = max(FEW, BUSIER * (sum(server.load for server in ready) + n) / len(ready))
            if not home.avoided and home.load + n <= limit:
                return home
        return min(ready, key=lambda server: (server.avoided, server.load))
