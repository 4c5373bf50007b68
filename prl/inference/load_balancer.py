"""Which of a model's servers gets the next request."""

import contextlib
import math
import time
from collections.abc import Iterator

from prl.errors import EngineError

AVOID_S = 5.0
"""A server that failed to answer is avoided for this long while another can take the request."""


class LoadBalancer:
    """Gives each request the server with the fewest requests in flight; one that has just failed comes last."""

    def __init__(self, urls: list[str]):
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.failed_at: dict[str, float] = {}
        """When a server last failed to answer, on the monotonic clock."""
        self._in_flight = dict.fromkeys(self.urls, 0)

    @contextlib.contextmanager
    def pick(self) -> Iterator[str]:
        """The URL for one request, which is in flight until the context is left."""
        url = min(self.urls, key=lambda url: (self.failing(url), self._in_flight[url]))
        self._in_flight[url] += 1
        try:
            yield url
        except EngineError as error:
            if error.of_server:
                self.failed_at[url] = time.monotonic()
            raise
        finally:
            self._in_flight[url] -= 1

    def failing(self, url: str) -> bool:
        """Whether this server has just failed to answer."""
        return time.monotonic() - self.failed_at.get(url, -math.inf) < AVOID_S
