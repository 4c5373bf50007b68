"""Files of the wire: all of it, or nothing."""

import os

import pytest

from prl.base import files
from prl.base.errors import PrlError
from prl.rollouts.messages import StepBatch
from prl.transport.files import FileTransport


@pytest.fixture
def transport(tmp_path):
    return FileTransport(tmp_path)


def everything(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_batch_comes_back_by_step_and_rank(tmp_path, transport):
    batches = [StepBatch(step=12, micro_batches=[], truncated=rank) for rank in range(2)]
    for rank, batch in enumerate(batches):
        transport.send_batch(batch, rank)
    assert everything(tmp_path) == ["batches/step_000012/rank_0.msgpack", "batches/step_000012/rank_1.msgpack"]
    assert [transport.receive_batch(12, rank) for rank in range(2)] == batches


def test_writing_replaces_what_was_there(tmp_path):
    for data in (b"one, and longer", b"two"):
        files.write_atomically(tmp_path / "deep" / "er" / "file", data)
    assert (tmp_path / "deep" / "er" / "file").read_bytes() == b"two"
    assert everything(tmp_path) == ["deep/er/file"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    path = tmp_path / "file"
    files.write_atomically(path, b"old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and everything(tmp_path) == ["file"]


def test_the_last_step_is_sent_beside_the_batches(tmp_path, transport):
    assert transport.receive_end() is None
    transport.send_batch(StepBatch(step=7, micro_batches=[], truncated=0), 0)
    assert transport.receive_end() is None
    transport.send_end(7)
    assert transport.receive_end() == 7 and transport.receive_batch(7, 0) is not None
    assert everything(tmp_path) == ["batches/end.json", "batches/step_000007/rank_0.msgpack"]
    transport.send_end(0)
    assert transport.receive_end() == 0


def test_a_published_version_has_its_metrics_and_its_weights(tmp_path, transport):
    def write_weights(folder):
        assert not transport.weights_path(2).exists() and transport.receive_metrics(2) is None
        (folder / "model.safetensors").write_bytes(b"weights")

    transport.publish(0, {})
    transport.publish(2, {"loss/mean": 0.25}, write_weights)
    assert transport.receive_metrics(0) == {} and transport.receive_metrics(1) is None
    assert transport.receive_metrics(2) == {"loss/mean": 0.25}
    assert (transport.weights_path(2) / "model.safetensors").read_bytes() == b"weights"
    assert everything(tmp_path / "weights") == [
        "step_000000/metrics.json",
        "step_000002/metrics.json",
        "step_000002/model.safetensors",
    ]


def test_publishing_that_fails_publishes_nothing(tmp_path, transport):
    def full(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        transport.publish(1, {"loss/mean": 1.0}, full)
    assert transport.receive_metrics(1) is None and everything(tmp_path) == []
    transport.publish(1, {"loss/mean": 2.0}, lambda folder: (folder / "model.safetensors").touch())
    assert transport.receive_metrics(1) == {"loss/mean": 2.0}


def test_discarding_frees_one_step_and_may_be_repeated(tmp_path, transport):
    for step in (1, 2):
        for rank in (0, 1):
            transport.send_batch(StepBatch(step, [], 0), rank)
        transport.publish(step, {})
    for _ in range(2):
        transport.discard_batch(1)
        transport.discard_weights(2)
    assert everything(tmp_path) == [
        "batches/step_000002/rank_0.msgpack",
        "batches/step_000002/rank_1.msgpack",
        "weights/step_000001/metrics.json",
    ]


@pytest.mark.parametrize("data", [b"", b"\x93\x01\x02", b'{"step": 1}'])
def test_a_damaged_batch_is_named(transport, data):
    path = transport.batch_path(1, 0)
    files.write_atomically(path, data)
    with pytest.raises(PrlError, match=f"{path} does not hold a batch: "):
        transport.receive_batch(1, 0)
