"""The folder by which orchestrator and trainer agree on transfers."""

import stat

import pytest

from prl.errors import PrlError
from prl.wire.broadcast import BroadcastTransport
from prl.wire.buckets import TensorSpec
from prl.wire.transfers import Answer, Layout, Loaded, Order


@pytest.fixture
def sides(tmp_path):
    """The orchestrator's and the trainer's."""
    ours, theirs = (BroadcastTransport(tmp_path, bucket_mb=3).transfers for _ in range(2))
    ours.begin()
    return ours, theirs


def test_each_side_reads_the_newest_of_the_other(sides):
    ours, theirs = sides
    assert theirs.read(Order) is None and theirs.bucket_bytes == 3 * 2**20
    for number in (1, 2):
        ours.write(Order(number, ours.store(1), 3, 60.0))
        assert theirs.read(Order) == theirs.read(Order) == Order(number, ours.store(1), 3, 60.0)
    theirs.write(Answer(2, 7))
    theirs.write(layout := Layout("cpu", 5, [TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "float32", ())]))
    assert ours.read(Answer) == Answer(2, 7) and ours.read(Layout) == layout


def test_the_folder_is_the_users_alone_and_new_for_each_run(sides):
    ours, theirs = sides
    assert stat.S_IMODE(ours.folder.stat().st_mode) == 0o700
    ours.write(Loaded(4))
    ours.end()
    ours.begin()
    assert theirs.read(Loaded) is None and not theirs.ended and list(ours.folder.iterdir()) == []


def test_what_the_trainer_need_not_wait_for(sides):
    ours, theirs = sides
    assert not theirs.passes
    with ours.passing():
        assert theirs.passes
    assert not theirs.passes and not theirs.ended
    ours.end()
    assert theirs.ended


def test_a_group_that_was_called_off_is_known_to_be(sides):
    ours, theirs = sides
    theirs.call_off(ours.store(1))
    assert ours.is_off(ours.store(1)) and not ours.is_off(ours.store(2))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"number": "x", "version": 1}', b"\xff"])
def test_a_damaged_message_is_named(sides, data):
    ours, theirs = sides
    (theirs.folder / "answer.json").write_bytes(data)
    with pytest.raises(PrlError, match=r"answer\.json does not hold"):
        ours.read(Answer)
