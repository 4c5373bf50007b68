"""The terminal: lines, or nothing."""

import pytest

from prl.monitors.console import Console


@pytest.fixture
def at(monkeypatch):
    """`at(seconds)`: sets the clock."""
    now = [100.0]
    monkeypatch.setattr("prl.monitors.console.time.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, 100.0 + seconds)


def test_plain_prints_one_line_a_step_and_logs_it(tmp_path, capsys, caplog, line, started, at):
    caplog.set_level("INFO", "prl.monitors.console")
    console = started(Console(mode="plain"), tmp_path)
    at(1)
    console.status("training [math]")
    at(20)
    console.step({"step": 0, "eval/math/avg@1": 0.3})
    at(25)
    console.step(line(1, **{"eval/math/avg@1": 0.4567}))
    at(90)
    console.step(line(4))
    console.close()
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines() == [
        "0:01  training [math]",
        "0:20  step 0/4  eval/math/avg@1=0.300",
        "0:25  step 1/4  reward=0.250  eval/math/avg@1=0.457  loss=-0.5000  entropy=1.000  staleness=0.5 (max 1)  "
        "tokens/s=1,234 generated, 99 trained  left=0:15",
        "1:30  step 4/4  reward=1.000  loss=-0.5000  entropy=1.000  staleness=0.5 (max 1)  "
        "tokens/s=1,234 generated, 99 trained  left=0:00",
    ]
    assert caplog.messages == [text.split("  ", 1)[1] for text in printed.err.splitlines()]


def test_quiet_prints_nothing_and_logs_each_step(tmp_path, capsys, caplog, line, started):
    caplog.set_level("INFO", "prl.monitors.console")
    console = started(Console(mode="quiet"), tmp_path)
    console.step(line(1))
    console.close()
    assert capsys.readouterr() == ("", "") and caplog.messages[0].startswith("step 1/4  reward=0.250  loss=")
