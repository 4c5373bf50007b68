"""Which servers of a model are at work, as their client sees it: with requests in flight, or loading weights."""

import contextlib
from collections.abc import Iterator, Sequence

from prl.transport.events import ENGINE, GENERATING, LOADING, Track


class Traffic:
    """Requests in flight by server, with their sequences, and a track for each."""

    def __init__(self, urls: Sequence[str]):
        self.in_flight = dict.fromkeys(urls, 0)
        self.load = dict.fromkeys(urls, 0)
        """Sequences that the requests in flight ask for."""
        self.answered = 0
        """Requests that were answered so far."""
        self._version = dict.fromkeys(urls, 0)
        self._loading = dict.fromkeys(urls, False)
        self._tracks: dict[str, Track] = {}
        self.record(Track(ENGINE))

    def record(self, track: Track) -> None:
        """From now on, write into the file of `track`."""
        names = tracks_of(len(self.in_flight))
        self._tracks = {url: track.beside(name) for url, name in zip(self.in_flight, names, strict=True)}

    def moved(self, url: str, now: str) -> None:
        """A server has another URL from now on; requests that it has are counted where they were."""
        if url == now:
            return
        for count in (self.in_flight, self.load, self._version):
            count[now] = 0
        self._loading[now] = False
        self._tracks[now] = self._tracks[url]

    @property
    def busy_s(self) -> float:
        """Seconds in which a server was at work, the mean over servers."""
        tracks = set(self._tracks.values())
        return sum(track.busy_s for track in tracks) / len(tracks)

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
            self._tracks[url].enter(LOADING, self._version[url])
        else:
            self._tracks[url].enter(GENERATING if self.in_flight[url] else None, self._version[url] + 1)


def tracks_of(servers: int) -> list[str]:
    """The names of the tracks of so many servers."""
    return [ENGINE] if servers == 1 else [f"{ENGINE} {place + 1}" for place in range(servers)]
