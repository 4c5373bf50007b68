"""metrics.jsonl, the terminal, wandb."""

import json
import sys
import time

import pytest

from prl.monitors.config import MonitorConfig
from prl.monitors.console import BARS, WIDTH, Console, clock, spark
from prl.monitors.monitor import Monitor


def line(step, **more):
    return {
        "step": step,
        "reward/all/mean": 0.25 * step,
        "loss/mean": -0.5,
        "entropy/all/mean": 1.0,
        "off_policy/mean": 0.5,
        "off_policy/max": 1.0,
        "tokens/generated_per_second": 1234.0,
        "tokens/trained_per_second": 99.0,
        "tokens/generated": 2468.0,
        "tokens/trained": 198.0,
        "time/step": 2.0,
    } | more


def make(run_dir, **config):
    return Monitor(MonitorConfig(**{"console": "quiet"} | config), run_dir, max_steps=4, run_config={"seed": 0})


def read(run_dir):
    return [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_line_is_on_disk_as_soon_as_its_step_is_recorded(tmp_path):
    monitor = make(tmp_path)
    for step in range(3):
        monitor.step(line(step))
        assert [entry["step"] for entry in read(tmp_path)] == list(range(step + 1))
    monitor.close()
    assert read(tmp_path)[2] == line(2)


def test_the_newest_value_of_every_metric_is_at_hand(tmp_path):
    monitor = make(tmp_path)
    monitor.step({"step": 0, "eval/math/avg@1": 0.3})
    monitor.step(line(1))
    assert monitor.last["step"] == 1 and monitor.last["eval/math/avg@1"] == 0.3
    monitor.close()


def test_plain_prints_one_line_a_step(tmp_path, capsys):
    monitor = make(tmp_path, console="plain")
    monitor.status("training")
    monitor.step({"step": 0, "eval/math/avg@1": 0.3})
    monitor.step(line(1, **{"eval/math/avg@1": 0.4567}))
    monitor.close()
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == "" and len(lines) == 3
    assert lines[0].endswith("training") and lines[1] == "step 0/4 eval/math/avg@1=0.300"
    assert lines[2].startswith("step 1/4 reward=0.250 loss=-0.5000 entropy=1.000 staleness=0.5 (max 1)")
    assert "1,234 generated, 99 trained" in lines[2] and lines[2].endswith("eval/math/avg@1=0.457")


def test_quiet_prints_nothing(tmp_path, capsys):
    monitor = make(tmp_path, console="quiet")
    monitor.status("training")
    monitor.step(line(1))
    monitor.close()
    assert capsys.readouterr() == ("", "")


def test_auto_is_live_on_a_terminal_and_quiet_elsewhere(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    assert Console("auto", 4).mode == "quiet"
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    console = Console("auto", 4)
    console.close()
    assert console.mode == "live"


def test_live_shows_the_step_the_reward_and_its_course(capsys):
    console = Console("live", 4)
    console.status("starting the engine")
    console.step({"step": 0})
    for step in (1, 2):
        console.step(line(step))
    console.close()
    shown = capsys.readouterr().err
    assert "step 2/4" in shown and "0.500" in shown and "▁█" in shown and "left" in shown
    console.close()  # a second time does no harm


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


def test_wandb_offline_stays_under_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monitor = make(run_dir, wandb="offline")
    for step in range(3):
        monitor.step(line(step))
    monitor.close()
    (folder,) = (run_dir / "wandb").glob("offline-run-*")
    (data,) = folder.glob("*.wandb")
    deadline = time.monotonic() + 30  # wandb's own process writes it, on a busy machine after `finish` has returned
    while b"reward/all/mean" not in data.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [entry["step"] for entry in read(run_dir)] == [0, 1, 2]


def test_wandb_is_not_imported_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    make(tmp_path).close()
    with pytest.raises(ImportError):
        make(tmp_path, wandb="offline")
