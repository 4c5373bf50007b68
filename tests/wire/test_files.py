"""Files of the wire: all of it, or nothing."""

import os

import pytest

from prl.wire import StepBatch, files


def everything(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_batch_comes_back_from_the_folder_of_its_step_and_rank(tmp_path):
    batches = [StepBatch(step=12, micro_batches=[], truncated=rank) for rank in range(2)]
    for rank, batch in enumerate(batches):
        files.write_batch(tmp_path, batch, rank)
    assert everything(tmp_path) == ["batches/step_000012/rank_0.msgpack", "batches/step_000012/rank_1.msgpack"]
    assert [files.read_batch(tmp_path, 12, rank) for rank in range(2)] == batches


def test_what_has_not_arrived_is_none(tmp_path):
    assert files.read_batch(tmp_path, 1, 0) is None
    assert files.read_metrics(tmp_path, 1) is None
    files.weights_path(tmp_path, 1).mkdir(parents=True)
    assert files.read_metrics(tmp_path, 1) is None


def test_writing_replaces_what_was_there(tmp_path):
    for data in (b"one, and longer", b"two"):
        files.write_atomically(tmp_path / "deep" / "er" / "file", data)
    assert (tmp_path / "deep" / "er" / "file").read_bytes() == b"two"
    assert everything(tmp_path) == ["deep/er/file"]


@pytest.mark.parametrize("where", ["write", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_part_of_the_new(tmp_path, monkeypatch, where):
    path = tmp_path / "file"
    files.write_atomically(path, b"old")
    if where == "write":
        data = "not bytes"
    else:
        data = b"new"

        def full(*_):
            raise OSError("no space left on device")

        monkeypatch.setattr(os, "replace", full)
    with pytest.raises((OSError, TypeError)):
        files.write_atomically(path, data)
    assert path.read_bytes() == b"old" and everything(tmp_path) == ["file"]


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    seen = []
    replace = os.replace

    def look(source, target):
        seen.append(files.read_batch(tmp_path, 1, 0))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    files.write_batch(tmp_path, StepBatch(step=1, micro_batches=[], truncated=0), 0)
    assert seen == [None] and files.read_batch(tmp_path, 1, 0) is not None


def test_announcing_replaces_the_whole_folder(tmp_path):
    final = files.weights_path(tmp_path, 4)
    final.mkdir(parents=True)
    (final / "left_over").touch()
    made = tmp_path / "weights" / "making"
    made.mkdir()
    (made / "metrics.json").write_text('{"loss/mean": 0.5}')
    files.announce(made, final)
    assert everything(tmp_path) == ["weights/step_000004/metrics.json"] and not made.exists()
    assert files.read_metrics(tmp_path, 4) == {"loss/mean": 0.5}


def test_step_names_sort_as_numbers():
    names = [files.step_name(step) for step in (0, 9, 10, 99_999, 100_000)]
    assert names == sorted(names) and names[1] == "step_000009"


def test_the_end_is_a_word_of_its_own_beside_the_batches(tmp_path):
    assert files.read_end(tmp_path) is None
    files.write_batch(tmp_path, StepBatch(step=7, micro_batches=[], truncated=0), 0)
    assert files.read_end(tmp_path) is None
    files.write_end(tmp_path, 7)
    assert files.read_end(tmp_path) == 7 and files.read_batch(tmp_path, 7, 0) is not None
    assert everything(tmp_path) == ["batches/end.json", "batches/step_000007/rank_0.msgpack"]
    files.write_end(tmp_path, 0)
    assert files.read_end(tmp_path) == 0
