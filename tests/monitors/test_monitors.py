"""All monitors of a run as one, and what becomes of one that fails."""

import signal

import pytest

from prl.base.errors import PrlError
from prl.monitors.base import Monitor, Monitors
from prl.monitors.console import Console
from prl.monitors.jsonl import JsonLines


class Notes(Monitor):
    """Notes what it is told, and fails where `fails` says."""

    def __init__(self, *, fails=()):
        self.fails, self.told = fails, []

    def note(self, what, *values):
        self.told.append((what, *values))
        if what in self.fails:
            raise RuntimeError(f"no {what} today")

    def start(self, run_dir, *, max_steps, run_config, resumed_at):
        self.note("start", run_dir, max_steps, run_config)

    def status(self, text):
        self.note("status", text)

    def step(self, line):
        self.note("step", dict(line))
        line.clear()  # must be nobody else's

    def close(self):
        self.note("close")


def begin(run_dir, **monitors):
    found = Monitors(monitors)
    found.start(run_dir, max_steps=4, run_config={"seed": 0})
    return found


def test_every_monitor_gets_everything_in_order(tmp_path):
    a, b = Notes(), Notes()
    monitors = begin(tmp_path, a=a, b=b)
    monitors.status("training")
    monitors.step(line := {"step": 0, "x": 0.5})
    monitors.step({"step": 1, "y": 1.5})
    monitors.close()
    told = [("start", tmp_path, 4, {"seed": 0}), ("status", "training")]
    told += [("step", {"step": 0, "x": 0.5}), ("step", {"step": 1, "y": 1.5}), ("close",)]
    assert a.told == b.told == told and line == {"step": 0, "x": 0.5}
    assert monitors.last == {"step": 1, "x": 0.5, "y": 1.5}


def test_failing_monitor_ends_the_run(tmp_path, line, read):
    broken = Notes(fails=("step",))
    monitors = begin(tmp_path, console=Console(mode="quiet"), jsonl=JsonLines(), mine=broken)
    with pytest.raises(PrlError, match=r"^monitor\.mine: Notes\.step failed: RuntimeError: no step today \(.*, line "):
        monitors.step(line(1))
    monitors.close()
    assert read(tmp_path) == [line(1)] and monitors.last == line(1)
    assert broken.told[-1] == ("close",)


def test_a_monitor_that_cannot_start_leaves_none_open(tmp_path):
    first, last = Notes(), Notes()
    with pytest.raises(PrlError, match=r"^monitor\.mine: Notes\.start failed: RuntimeError: no start today"):
        begin(tmp_path, first=first, mine=Notes(fails=("start",)), last=last)
    assert [what for what, *_ in first.told] == ["start", "close"] and not last.told


def test_ctrl_c_while_one_starts_stays_what_it_is(tmp_path):
    first, waits = Notes(), Notes()
    waits.start = lambda *_, **__: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path, first=first, waits=waits)
    assert [what for what, *_ in first.told] == ["start", "close"]


def test_a_failing_close_is_a_warning_and_others_close(tmp_path, caplog):
    first, last = Notes(), Notes()
    monitors = begin(tmp_path, first=first, mine=Notes(fails=("close",)), last=last)
    monitors.close()
    assert first.told[-1] == last.told[-1] == ("close",)
    (printed,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert printed.startswith("monitor.mine: Notes.close failed: RuntimeError: no close today")
    monitors.close()
    assert first.told.count(("close",)) == 1, "each is closed once"
