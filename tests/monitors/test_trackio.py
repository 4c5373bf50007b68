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
