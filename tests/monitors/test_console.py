"""The terminal: a table, lines, or nothing."""

import pytest

from prl.config.instantiate import build
from prl.errors import ConfigError
from prl.monitors.base import Monitor
from prl.monitors.console import BARS, WIDTH, Console, clock, spark


def test_plain_prints_one_line_a_step(tmp_path, capsys, line, started):
    console = started(Console(mode="plain"), tmp_path)
    console.status("training")
    console.step({"step": 0, "eval/math/avg@1": 0.3})
    console.step(line(1, **{"eval/math/avg@1": 0.4567}))
    console.close()
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == "" and len(lines) == 3
    assert lines[0].endswith("training") and lines[1] == "step 0/4 eval/math/avg@1=0.300"
    assert lines[2].startswith("step 1/4 reward=0.250 loss=-0.5000 entropy=1.000 staleness=0.5 (max 1)")
    assert "1,234 generated, 99 trained" in lines[2] and lines[2].endswith("eval/math/avg@1=0.457")


def test_quiet_prints_nothing(tmp_path, capsys, line, started):
    console = started(Console(mode="quiet"), tmp_path)
    console.status("training")
    console.step(line(1))
    console.close()
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_auto_is_live_on_a_terminal_and_quiet_elsewhere(tmp_path, monkeypatch, started):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    assert started(Console(), tmp_path).shown == "quiet"
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    console = started(Console(), tmp_path)
    console.close()
    assert console.shown == "live"


def test_live_shows_the_step_the_reward_and_its_course(tmp_path, capsys, line, started):
    console = started(Console(mode="live"), tmp_path)
    console.status("starting the engine")
    console.step({"step": 0})
    for step in (1, 2):
        console.step(line(step))
    console.close()
    shown = capsys.readouterr().err
    assert "step 2/4" in shown and "0.500" in shown and "▁█" in shown and "left" in shown
    console.close()  # a second time does no harm


def test_a_mode_that_does_not_exist_is_refused_with_those_that_do():
    node = {"_target_": "prl.monitors.console.Console", "mode": "loud"}
    with pytest.raises(ConfigError, match=r"^monitor\.console\.mode='loud': choose auto, live, plain or quiet$"):
        build(node, Monitor, "monitor.console")


@pytest.mark.parametrize(
    ("values", "bars"),
    [([0.0, 1.0], "▁█"), ([1.0, 0.5, 0.0], "█▄▁"), ([0.3], "▁"), ([2.0] * 3, "▁▁▁"), ([-1.0, 0.0], "▁█")],
)
def test_spark_scales_to_the_range(values, bars):
    assert spark(values) == bars


@pytest.mark.parametrize("n", [1, WIDTH - 1, WIDTH, WIDTH + 1, 10 * WIDTH + 7])
def test_spark_never_grows_wider_than_its_place(n):
    shown = spark([float(i) for i in range(n)])
    assert 0 < len(shown) <= WIDTH and set(shown) <= set(BARS)
    assert list(shown) == sorted(shown, key=BARS.index), "a rising series rises"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3599, "59:59"), (3600, "1:00:00"), (7325, "2:02:05")],
)
def test_clock(seconds, shown):
    assert clock(seconds) == shown
