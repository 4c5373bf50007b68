"""All monitors of a run as one, and what becomes of one that fails."""

import os

import pytest

from prl.config.build import build
from prl.errors import ConfigError, PrlError
from prl.monitors.base import Monitor, Monitors
from prl.monitors.console import Console
from prl.monitors.jsonl import JsonLines


class Notes(Monitor):
    """Notes what it is told, and fails where `fails` says."""

    raises = RuntimeError

    def __init__(self, *, fails=()):
        self.fails, self.told = fails, []

    def note(self, what, *values):
        self.told.append((what, *values))
        if what in self.fails:
            raise self.raises(f"no {what} today")

    def start(self, run_dir, *, max_steps, run_config):
        self.note("start", run_dir, max_steps, run_config)

    def status(self, text):
        self.note("status", text)

    def step(self, line):
        self.note("step", dict(line))
        line.clear()  # must be nobody else's

    def close(self):
        self.note("close")


class Reader(Monitor):
    """Reads a file that is not there."""

    def __init__(self, path):
        self.path = path

    def step(self, line):
        os.stat(self.path)


def test_a_file_that_a_monitor_reads_is_not_said_to_be_written(tmp_path):
    monitors = begin(tmp_path, mine=Reader(tmp_path / "baseline.json"))
    with pytest.raises(PrlError) as raised:
        monitors.step({"step": 0})
    said = f"monitor.mine: Reader.step failed: FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}"
    assert str(raised.value).startswith(said) and f"({__file__}, line " in str(raised.value)


def begin(run_dir, **monitors):
    found = Monitors(monitors)
    found.start(run_dir, max_steps=4, run_config={"seed": 0})
    return found


def test_every_monitor_is_told_everything_in_order(tmp_path):
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


def test_the_newest_value_of_every_metric_is_at_hand_without_any_monitor(tmp_path, line):
    monitors = begin(tmp_path)
    monitors.step({"step": 0, "eval/math/avg@1": 0.3})
    monitors.step(line(1))
    assert monitors.last["step"] == 1 and monitors.last["eval/math/avg@1"] == 0.3
    monitors.close()


def test_a_monitor_that_fails_ends_the_run_by_its_name_and_keeps_no_line_from_the_others(tmp_path, line, read):
    broken, after = Notes(fails=("step",)), Notes()
    monitors = begin(tmp_path, console=Console(mode="quiet"), mine=broken, jsonl=JsonLines(), after=after)
    with pytest.raises(
        PrlError, match=r"^monitor\.mine: Notes\.step failed: RuntimeError: no step today \(.*, line "
    ) as e:
        monitors.step(line(1))
    assert isinstance(e.value.__cause__, RuntimeError)
    monitors.close()
    assert read(tmp_path) == [line(1)] and monitors.last == line(1)
    assert after.told[1:] == [("step", line(1)), ("close",)] and broken.told[-1] == ("close",)


def test_the_first_of_several_failures_is_named(tmp_path):
    monitors = begin(tmp_path, a=Notes(), b=Notes(fails=("status",)), c=Notes(fails=("status",)))
    with pytest.raises(PrlError, match=r"^monitor\.b: Notes\.status failed"):
        monitors.status("training")


def test_what_a_monitor_says_itself_stays_as_it_is(tmp_path):
    class Full(Notes):
        def step(self, line):
            raise PrlError("the disk is full")

    with pytest.raises(PrlError, match=r"^monitor\.mine: Full\.step failed: the disk is full$"):
        begin(tmp_path, mine=Full()).step({"step": 0})


def test_a_monitor_that_cannot_start_leaves_none_open(tmp_path):
    first, last = Notes(), Notes()
    with pytest.raises(PrlError, match=r"^monitor\.mine: Notes\.start failed: RuntimeError: no start today"):
        begin(tmp_path, first=first, mine=Notes(fails=("start",)), last=last)
    assert [what for what, *_ in first.told] == ["start", "close"] and not last.told


def test_a_monitor_that_cannot_close_is_a_warning_and_the_others_close(tmp_path, caplog):
    first, last = Notes(), Notes()
    monitors = begin(tmp_path, first=first, mine=Notes(fails=("close",)), last=last)
    monitors.close()
    assert first.told[-1] == last.told[-1] == ("close",)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("monitor.mine: Notes.close failed: RuntimeError: no close today")
    monitors.close()
    assert first.told.count(("close",)) == 1, "each is closed once"


def test_an_exit_and_an_interrupt_of_a_monitors_are_failures_too(tmp_path, monkeypatch, caplog):
    for error in (SystemExit, KeyboardInterrupt):
        monkeypatch.setattr(Notes, "raises", error)
        with pytest.raises(
            PrlError, match=rf"^monitor\.mine: Notes\.start failed: {error.__name__}: no start today \("
        ):
            begin(tmp_path, mine=Notes(fails=("start",)))
        begin(tmp_path, mine=Notes(fails=("close",))).close()
        assert f"monitor.mine: Notes.close failed: {error.__name__}: no close today (" in caplog.text


def test_a_monitor_of_ones_own_writes_one_method(tmp_path, monkeypatch):
    (tmp_path / "my_monitors.py").write_text(
        "from prl.monitors.base import Monitor\n"
        "class Best(Monitor):\n"
        "    def __init__(self, *, metric: str = 'reward/all/mean'):\n"
        "        self.metric, self.best = metric, float('-inf')\n"
        "    def step(self, line):\n"
        "        self.best = max(self.best, line.get(self.metric, self.best))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    node = {"_target_": "my_monitors.Best", "metric": "x"}
    mine = build(node, Monitor, "monitor.best")
    monitors = begin(tmp_path, best=mine)
    monitors.status("training")
    for value in (0.1, 0.7, 0.4):
        monitors.step({"step": 0, "x": value})
    monitors.close()
    assert mine.best == 0.7
    with pytest.raises(
        ConfigError, match=r"^monitor\.best\.metrc: Best has no such option; did you mean monitor\.best\.metric"
    ):
        build({"_target_": "my_monitors.Best", "metrc": "x"}, Monitor, "monitor.best")
    with pytest.raises(ConfigError, match=r"is not a subclass of prl\.monitors\.base\.Monitor$"):
        build({"_target_": "prl.orchestrator.buffer.task_buffer.TaskBuffer"}, Monitor, "monitor.best")
