"""The transport without a disk: batches, their end, and versions with metrics, between both sides of a run."""

import json
import math
import time

import pytest
from sides import joined, until

from prl.errors import PrlError
from prl.wire.broadcast import BroadcastTransport
from prl.wire.exchange import Batch, Published
from prl.wire.files import FileTransport
from prl.wire.messages import MicroBatch, StepBatch


def batch(step, token=1):
    row = MicroBatch(
        input_ids=[token, 2],
        mask=[False, True],
        logprobs=[0.0, -0.5],
        temperatures=[1.0, 1.0],
        position_ids=[0, 1],
        sequence_lengths=[2],
        env_names=["math"],
        losses=[""],
        advantages=[0.0, math.pi],
    )
    return StepBatch(step, [row], 3, checkpoint=step == 2)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def run(tmp_path):
    """`run(ranks)`: the orchestrator's side and the ranks', in one run directory; JSON has passed the invitation."""
    made = []

    def begin(ranks=1, **knobs):
        made.append(ours := BroadcastTransport(tmp_path))
        invitation = json.loads(json.dumps(ours.begin("127.0.0.1", ranks, **knobs)))
        for rank in range(ranks):
            made.append(BroadcastTransport(tmp_path))
            joined(ours, made[-1], invitation, rank)
        return made

    yield begin
    for side in made:
        side.close()


def received(theirs, step, rank, ours):
    return until(lambda: ours.receive_metrics(999) or theirs.receive_batch(step, rank))


def test_every_rank_gets_its_share_of_each_step_once_and_nothing_is_on_the_disk(run, tmp_path):
    ours, *ranks = run(2)
    for step in (1, 2):
        for rank in (0, 1):
            ours.send_batch(batch(step, token=10 * step + rank), rank)
    for rank, theirs in enumerate(ranks):
        assert received(theirs, 2, rank, ours) == batch(2, token=20 + rank)
        assert theirs.receive_batch(1, rank) == batch(1, token=10 + rank), "it has come before"
        assert theirs.receive_batch(1, rank) is None and theirs.receive_batch(3, rank) is None
    ours.discard_batch(1)
    assert files(tmp_path) == []


def test_all_ranks_hear_of_the_end_after_the_last_batch(run):
    ours, *ranks = run(2)
    assert [theirs.receive_end() for theirs in ranks] == [None, None]
    for rank in (0, 1):
        ours.send_batch(batch(7), rank)
    ours.send_end(7)
    for rank, theirs in enumerate(ranks):
        assert until(lambda theirs=theirs: ours.receive_metrics(999) or theirs.receive_end()) == 7
        assert theirs.receive_batch(7, rank) == batch(7), "nobody who knows of the end lacks a batch"


def test_metrics_are_those_that_a_file_would_hold_also_if_nobody_listened_yet(run, tmp_path):
    ours, theirs = run()
    metrics = {"loss/mean": 0.1, "grad_norm": float("inf"), "entropy": float("nan")}
    theirs.publish(3, metrics)
    theirs.publish(4, {})
    assert files(tmp_path) == []
    found = until(lambda: theirs.receive_end() or ours.receive_metrics(3))
    assert ours.receive_metrics(3) is None and until(lambda: ours.receive_metrics(4) is not None)
    FileTransport(tmp_path).publish(3, metrics)
    assert found == FileTransport(tmp_path).receive_metrics(3) == {"loss/mean": 0.1, "grad_norm": None, "entropy": None}


def test_weights_that_a_run_goes_on_from_are_files(run, tmp_path):
    ours, theirs = run()
    theirs.publish(5, {}, lambda folder: (folder / "model.safetensors").write_bytes(b"w"))
    assert until(lambda: theirs.receive_end() or ours.receive_metrics(5) is not None)
    assert (ours.weights_path(5) / "model.safetensors").read_bytes() == b"w"
    ours.discard_weights(5)
    assert files(tmp_path) == []


def test_weights_that_cannot_be_written_are_not_announced(run):
    ours, theirs = run()

    def fail(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        theirs.publish(1, {}, fail)
    theirs.publish(2, {})
    assert (
        until(lambda: theirs.receive_end() or ours.receive_metrics(2) is not None) and ours.receive_metrics(1) is None
    )


def test_batches_that_are_kept_are_there_for_a_replay(run, tmp_path):
    ours, theirs = run(keep_batches=True)
    ours.send_batch(batch(1), 0)
    assert received(theirs, 1, 0, ours) == batch(1)
    assert BroadcastTransport(tmp_path).receive_batch(1, 0) == FileTransport(tmp_path).receive_batch(1, 0) == batch(1)
    assert BroadcastTransport(tmp_path).receive_batch(2, 0) is None


def test_a_rank_of_the_run_before_hears_nothing_of_the_next_one(run, tmp_path, monkeypatch):
    """It goes on connecting where that run listened, and the next one may have the port."""
    monkeypatch.setattr("prl.wire.session.ANSWER_S", 0.5)
    first = BroadcastTransport(tmp_path)
    invitation = first.begin("127.0.0.1", 1)
    first.close()
    ours, _ = run()
    ours.send_batch(batch(1), 0)
    stale = BroadcastTransport(tmp_path)
    with pytest.raises(PrlError, match="did not answer rank 0"):
        joined(ours, stale, invitation | {"address": ours.transfers.exchange.end.invitation.address}, 0)
    stale.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_reach_the_orchestrator_says_so_as_it_joins(run, tmp_path, monkeypatch, rank):
    """Whichever it is, before it loads a model."""
    monkeypatch.setattr("prl.wire.session.ANSWER_S", 0.5)
    ours, theirs = BroadcastTransport(tmp_path), BroadcastTransport(tmp_path)
    invitation = ours.begin("127.0.0.1", 2)
    ours.close()  # nobody listens there now
    began = time.monotonic()
    with pytest.raises(
        PrlError, match=rf"the orchestrator at tcp://127\.0\.0\.1:\d+ did not answer rank {rank} within"
    ):
        theirs.join(invitation, rank)
    assert 0.4 < time.monotonic() - began < 5
    theirs.close()


def test_a_rank_that_publishes_without_an_end_ends_the_run(run, monkeypatch):
    """Versions that were asked for do not count."""
    monkeypatch.setattr("prl.wire.exchange.UNREAD", 10_000)
    ours, theirs = run()
    for version in range(100):
        theirs.publish(version, {})
        assert until(lambda version=version: theirs.receive_end() or ours.receive_metrics(version) is not None)
    for version in range(100, 110):
        theirs.publish(version, {})
    with pytest.raises(PrlError, match="rank 0 of the trainer published 10 versions that the run is not at yet"):
        until(lambda: theirs.receive_end() or ours.tend())


def test_what_only_the_other_side_may_say_is_not_taken(run):
    ours, theirs = run()
    theirs.transfers.exchange.post(Batch(batch(1)))
    with pytest.raises(PrlError, match="rank 0 of the trainer sent what is no message"):
        until(lambda: ours.tend())
    ours.transfers.exchange.post(Published(1, b"{}"))
    with pytest.raises(PrlError, match="the orchestrator sent what is no message"):
        until(lambda: theirs.receive_batch(1, 0))
