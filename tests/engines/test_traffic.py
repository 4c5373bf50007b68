"""When a server counts as at work."""

import msgspec
import pytest

from prl.engines.servers import Server, Traffic
from prl.transport import events


@pytest.fixture
def clock(monkeypatch):
    at = [0.0]
    monkeypatch.setattr(events, "now", lambda: at[0])
    return lambda time: at.__setitem__(0, time)


class Recording(events.Track):
    """Keeps its spans, and those of the tracks beside it."""

    closed = False

    def __init__(self, process="orchestrator", spans=None):
        super().__init__(process)
        self.spans = [] if spans is None else spans
        self._file = self

    def beside(self, process):
        return Recording(process, self.spans)

    def write(self, line):
        span = msgspec.json.decode(line, type=events.Span)
        self.spans.append((span.process, span.what, span.start, span.stop, span.step))


def test_server_works_from_first_to_last_request(clock):
    server, track = Server("http://a"), Recording()
    traffic = Traffic([server])
    traffic.record(track)
    with traffic.request(server):
        clock(1)
        with traffic.request(server):
            clock(2)
            assert server.in_flight == 2
        clock(3)
    clock(5)
    with pytest.raises(ValueError, match="failed"), traffic.request(server):
        clock(6)
        raise ValueError("failed")
    assert server.in_flight == 0
    assert track.spans == [("engine", "generating", 0, 3, 1), ("engine", "generating", 5, 6, 1)]
    assert traffic.busy_s == 4


def test_loading_server_counts_as_at_work(clock):
    one, other, track = Server("http://a"), Server("http://b"), Recording()
    traffic = Traffic([one, other])
    traffic.record(track)
    with traffic.request(one):
        clock(1)
        with traffic.loading(one, 7), traffic.loading(other, 7):
            clock(3)
        clock(4)
    clock(10)
    assert sorted(track.spans) == [
        ("engine 1", "generating", 0, 1, 1),
        ("engine 1", "generating", 3, 4, 8),
        ("engine 1", "loading weights", 1, 3, 7),
        ("engine 2", "loading weights", 1, 3, 7),
    ]
    assert traffic.busy_s == 3, "the mean of 4 and 2"
