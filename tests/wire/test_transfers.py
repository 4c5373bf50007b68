"""What orchestrator and trainer say to each other about transfers, and the folder where peers meet."""

import stat

import msgspec
import pytest
from sides import Sides, until

from prl.errors import PrlError
from prl.wire.buckets import TensorSpec
from prl.wire.exchange import Answer, Batch, Layout, Loaded, Order
from prl.wire.messages import StepBatch


@pytest.fixture
def sides(tmp_path):
    """The orchestrator's and the trainer's, which are connected."""
    with Sides(tmp_path / "weights" / "transfer", 5) as both:
        yield both.ours, both.theirs()


def test_each_side_reads_the_newest_of_the_other(sides):
    ours, theirs = sides
    assert theirs.read(Order) is None and theirs.bucket_bytes == 5
    for number in (1, 2):
        ours.write(Order(number, ours.store(1), 3, 60.0))
    until(lambda: theirs.read(Order) == Order(2, ours.store(1), 3, 60.0))
    assert theirs.read(Order) == Order(2, ours.store(1), 3, 60.0), "it stays the newest"
    theirs.write(layout := Layout("cpu", 5, [TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "float32", ())]))
    theirs.write(Answer(2, 7))
    assert until(lambda: ours.read(Answer)) == Answer(2, 7) and ours.read(Layout) == layout


def test_the_folder_is_the_users_alone_and_new_for_each_run(sides):
    ours, _ = sides
    assert stat.S_IMODE(ours.folder.stat().st_mode) == 0o700
    ours.call_off(ours.store(1))
    ours.begin()
    assert list(ours.folder.iterdir()) == []


def test_what_the_trainer_need_not_wait_for(sides):
    ours, theirs = sides
    assert not theirs.passes
    with ours.passing():
        until(lambda: theirs.passes)
    until(lambda: not theirs.passes)
    assert not theirs.ended
    ours.end()
    until(lambda: theirs.ended)


def test_a_group_that_was_called_off_is_known_to_be(sides):
    ours, theirs = sides
    theirs.call_off(ours.store(1))
    assert ours.is_off(ours.store(1)) and not ours.is_off(ours.store(2))


WRONG = {"type": "Answer", "number": "x", "version": 1}
UNKNOWN = {"type": "Weights", "number": 1}


@pytest.mark.parametrize("data", [b"", b"\xc1", b"{}", *map(msgspec.msgpack.encode, ([], WRONG, UNKNOWN))])
def test_what_is_no_message_is_named(sides, data):
    ours, theirs = sides
    theirs.exchange.end.post(data)
    with pytest.raises(PrlError, match="rank 0 of the trainer sent what is no message"):
        until(lambda: ours.read(Loaded), 10)


def test_a_batch_of_wrong_types_is_named(sides):
    ours, theirs = sides
    data = msgspec.to_builtins(Batch(StepBatch(1, [], 0)))
    data["content"]["micro_batches"] = 7
    ours.exchange.end.post(msgspec.msgpack.encode(data), 0)
    with pytest.raises(PrlError, match=r"the orchestrator sent what is no message: .*content\.micro_batches"):
        until(lambda: theirs.read(Loaded), 10)
