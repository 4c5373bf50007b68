"""Which servers of a model are at work, as their client sees it: with requests in flight, or loading weights."""

import contextlib
from collections.abc import Iterator, Sequence

from prl.engines.routing import Server
from prl.transport.events import ENGINE, Track


class Traffic:
    """What each server of a model is asked for, as its track records it."""

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
