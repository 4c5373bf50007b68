"""Tracks: what they record, what they count, and what a disk that is full does to them."""

import msgspec
import pytest

from prl.transport import events
from prl.transport.events import Span, Track


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand: `clock(12.5)`."""
    at = [0.0]
    monkeypatch.setattr(events, "now", lambda: at[0])
    return lambda time: at.__setitem__(0, time)


def recorded(run, name="trainer"):
    lines = (run / "events" / f"{name}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Span) for line in lines]


def test_what_follows_ends_what_was_before(tmp_path, clock):
    track = Track("trainer", tmp_path)
    for at, what, step in ((1, "a", 1), (3, "a", 1), (4, "b", 1), (4.5, None, 0), (6, None, 3), (7, "a", 2)):
        clock(at)
        track.enter(what, step)
    assert track.busy_s == 3.5, "3 s of a, half a second of b"
    clock(9)
    assert track.busy_s == 5.5, "what it does now counts"
    assert recorded(tmp_path) == [Span("trainer", "a", 1, 4, 1), Span("trainer", "b", 4, 4.5, 1)], "each at once"
    track.close()
    assert recorded(tmp_path)[2:] == [Span("trainer", "a", 7, 9, 2)]
    track.enter("late", 1)
    track.close()
    assert len(recorded(tmp_path)) == 3, "a track that is closed records nothing"


def test_tracks_side_by_side_share_a_file(tmp_path, clock):
    track = Track("orchestrator", tmp_path)
    other = track.beside("engine 1")
    track.enter("preparing", 4)
    with other.doing("starting", track.step):
        clock(5)
    track.close()
    found = recorded(tmp_path, "orchestrator")
    assert found == [Span("engine 1", "starting", 0, 5, 4), Span("orchestrator", "preparing", 0, 5, 4)]
