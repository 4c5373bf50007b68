"""Which servers of a model are at work, as their client sees it: with requests in flight, or loading weights."""

import contextlib
from collections.abc import Iterator, Sequence

from prl.wire.events import ENGINE, GENERATING, LOADING, Lane


class Traffic:
    """Requests in flight by server, and a lane for each."""

    def __init__(self, urls: Sequence[str]):
        self.in_flight = dict.fromkeys(urls, 0)
        self._version = 0
        self._loading = False
        self._lanes: dict[str, Lane] = {}
        self.record(Lane(ENGINE))

    def record(self, lane: Lane) -> None:
        """From now on, write into the file of `lane`."""
        names = [ENGINE] if len(self.in_flight) == 1 else [f"{ENGINE} {i + 1}" for i in range(len(self.in_flight))]
        self._lanes = {url: lane.beside(name) for url, name in zip(self.in_flight, names, strict=True)}

    @property
    def busy_s(self) -> float:
        """Seconds in which a server was at work, the mean over servers."""
        return sum(lane.busy_s for lane in self._lanes.values()) / len(self._lanes)

    @contextlib.contextmanager
    def request(self, url: str) -> Iterator[None]:
        """A request is in flight inside the block."""
        self.in_flight[url] += 1
        if self.in_flight[url] == 1:
            self._enter(url)
        try:
            yield
        finally:
            self.in_flight[url] -= 1
            if not self.in_flight[url]:
                self._enter(url)

    @contextlib.contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """The servers load the weights of `version` inside the block; requests in flight wait."""
        self._loading, self._version = True, version
        try:
            for url in self.in_flight:
                self._enter(url)
            yield
        finally:
            self._loading = False
            for url in self.in_flight:
                self._enter(url)

    def _enter(self, url: str) -> None:
        if self._loading:
            self._lanes[url].enter(LOADING, self._version)
        else:
            self._lanes[url].enter(GENERATING if self.in_flight[url] else None, self._version + 1)
