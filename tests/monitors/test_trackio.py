"""Trackio's database on this machine, read back."""

import sqlite3
from contextlib import closing

import msgspec
import pytest

from prl.monitors.trackio import Trackio


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """`rows()`: name, step and metrics of each line in the database."""
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")

    def read():
        with closing(sqlite3.connect(tmp_path / "trackio" / "prl.db")) as database:
            lines = database.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
        return [(run, name, step, msgspec.json.decode(metrics)) for run, name, step, metrics in lines]

    return read


def record(run_dir, lines, *, resumed_at=0):
    monitor = Trackio()
    monitor.start(run_dir, max_steps=9, run_config={"seed": 0}, resumed_at=resumed_at)
    for line in lines:
        monitor.step(line)
    monitor.close()


def test_a_run_that_goes_on_is_one_run_and_one_that_begins_anew_another(tmp_path, rows, capfd):
    run_dir = tmp_path / "hello"
    record(run_dir, [{"step": 0, "loss/mean": 0.0}, {"step": 1, "loss/mean": 0.5}])
    record(run_dir, [{"step": 1, "loss/mean": 9.0}, {"step": 2, "eval/math/pass@8": 1.0}], resumed_at=1)
    record(run_dir, [{"step": 0, "loss/mean": 7.0}])
    runs, names, steps, metrics = zip(*rows(), strict=True)
    assert set(names) == {"hello"} and steps == (0, 1, 2, 0)
    assert metrics == ({"loss/mean": 0.0}, {"loss/mean": 0.5}, {"eval/math/pass@8": 1.0}, {"loss/mean": 7.0})
    assert len(set(runs[:3])) == 1 and runs[3] != runs[0]
    assert capfd.readouterr() == ("", "")


def test_rollouts_are_traces(tmp_path, rows, write_rollouts):
    run_dir = tmp_path / "hello"
    write_rollouts(run_dir, 1, 9)
    record(run_dir, [{"step": step, "loss/mean": 0.5} for step in range(3)])
    with closing(sqlite3.connect(tmp_path / "trackio" / "prl.db")) as database:
        traces = database.execute("select run_name, step, messages, metadata from traces").fetchall()
    assert {(name, step) for name, step, *_ in traces} == {("hello", 1)} and len(traces) == 8
    messages, facts = map(msgspec.json.decode, traces[0][2:])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[0]["content"] == "12+34=[picture abababab]"
    assert messages[1]["reasoning_content"] == "carry" and r"\x1b[2J" in messages[1]["content"]
    assert messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": '{"a": 12}'}}]
    assert (facts["env"], facts["task"], facts["rollout"], facts["reward"]) == ("math", 3, 0, None)
    assert all(set(metrics) == {"loss/mean"} for *_, metrics in rows())
