"""metrics.jsonl."""

import pytest

from prl.base.errors import PrlError
from prl.monitors.jsonl import JsonLines


def test_each_line_is_on_disk_at_once(tmp_path, line, read, started):
    monitor = started(JsonLines(), tmp_path)
    for step in range(3):
        monitor.step(line(step))
        assert [entry["step"] for entry in read(tmp_path)] == list(range(step + 1))
    monitor.close()
    assert read(tmp_path)[2] == line(2)


def test_lines_are_added_to_those_that_are_there(tmp_path, line, read, started):
    for step in range(2):
        monitor = started(JsonLines(), tmp_path)
        monitor.step(line(step))
        monitor.close()
    assert [entry["step"] for entry in read(tmp_path)] == [0, 1]


def test_a_full_disk_is_named(tmp_path, line, started):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    monitor = started(JsonLines(), tmp_path)
    with pytest.raises(PrlError) as raised:
        monitor.step(line(0))
    assert f"{tmp_path}/metrics.jsonl" in str(raised.value)
    monitor.close()
