"""Which servers of a model are at work, as their client sees it: with requests in flight, or loading weights."""

import contextlib
from collections.abc import Iterator, Sequence

from prl.transport.events import ENGINE, GENERATING, LOADING, Lane


class Traffic:
    """Requests in flight by server, with their sequences, and a lane for each."""

    def __init__(self, urls: Sequence[str]):
        self.in_flight = dict.fromkeys(urls, 0)
        self.load = dict.fromkeys(urls, 0)
        """Sequences that the requests in flight ask for."""
        self.answered = 0
        """Requests that were answered so far."""
        self._version = dict.fromkeys(urls, 0)
        self._loading = dict.fromkeys(urls, False)
        self._lanes: dict[str, Lane] = {}
        self.record(Lane(ENGINE))

    def record(self, lane: Lane) -> None:
        """From now on, write into the file of `lane`."""
        names = lanes_of(len(self.in_flight))
        self._lanes = {url: lane.beside(name) for url, name in zip(self.in_flight, names, strict=True)}

    @property
    def busy_s(self) -> float:
        """Seconds in which a server was at work, the mean over servers."""
        return sum(lane.busy_s for lane in self._lanes.values()) / len(self._lanes)

    @contextlib.contextmanager
    def request(self, url: str, n: int = 1) -> Iterator[None]:
        """A request for `n` sequences is in flight inside the block."""
        self.in_flight[url] += 1
        self.load[url] += n
        if self.in_flight[url] == 1:
            self._enter(url)
        try:
            yield
            self.answered += 1
        finally:
            self.in_flight[url] -= 1
            self.load[url] -= n
            if not self.in_flight[url]:
                self._enter(url)

    @contextlib.contextmanager
    def loading(self, url: str, version: int) -> Iterator[None]:
        """The server loads the weights of `version` inside the block; requests in flight wait."""
        self._loading[url], self._version[url] = True, version
        self._enter(url)
        try:
            yield
        finally:
            self._loading[url] = False
            self._enter(url)

    def _enter(self, url: str) -> None:
        if self._loading[url]:
            self._lanes[url].enter(LOADING, self._version[url])
        else:
            self._lanes[url].enter(GENERATING if self.in_flight[url] else None, self._version[url] + 1)


def lanes_of(servers: int) -> list[str]:
    """The names of the lanes of so many servers."""
    return [ENGINE] if servers == 1 else [f"{ENGINE} {place + 1}" for place in range(servers)]
