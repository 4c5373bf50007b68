"""Weights & Biases, offline."""

import sys
import time

import pytest

from prl.base.errors import ConfigError
from prl.monitors.tensorboard import TensorBoard
from prl.monitors.trackio import Trackio
from prl.monitors.wandb import Wandb, run_id, sweep_of


@pytest.mark.slow
def test_offline_stays_under_the_run_directory(tmp_path, monkeypatch, line, started):
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monitor = started(Wandb(), run_dir)
    for step in range(3):
        monitor.step(line(step))
    monitor.close()
    (folder,) = (run_dir / "wandb").glob(f"offline-run-*-{run_id(run_dir, goes_on=True)}")
    (data,) = folder.glob("*.wandb")
    deadline = time.monotonic() + 30  # wandb's own process writes it, on a busy machine after `finish` has returned
    while b"reward/all/mean" not in data.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_goes_on_is_the_same_run(tmp_path):
    first = run_id(tmp_path, goes_on=False)
    assert run_id(tmp_path, goes_on=True) == first
    assert run_id(tmp_path, goes_on=False) != first, "it begins again"


@pytest.mark.parametrize(("mode", "resumed_at", "resume"), [("online", 7, "allow"), ("offline", 7, None)])
def test_what_it_asks_for_when_a_run_goes_on(tmp_path, monkeypatch, capsys, mode, resumed_at, resume):
    """And a line before that, since it may take half a minute."""
    asked = {}

    def init(**given):
        asked.update(given, printed=capsys.readouterr().err)

    monkeypatch.setattr("wandb.init", init)
    monitor = Wandb(mode=mode)
    monitor.start(tmp_path, max_steps=9, run_config={}, resumed_at=resumed_at)
    assert asked["printed"].count("\n") == 1 and "Weights & Biases" in asked["printed"]
    assert asked["resume"] == resume and asked["id"] == run_id(tmp_path, goes_on=True)


def test_the_jobs_of_a_sweep_are_a_group(tmp_path):
    assert sweep_of(tmp_path / "sweep" / "seed=0") is None
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    assert sweep_of(tmp_path / "sweep" / "seed=0") == "sweep"


@pytest.mark.parametrize(("package", "monitor"), [("wandb", Wandb), ("tensorboard", TensorBoard), ("trackio", Trackio)])
def test_a_missing_package_is_refused_before_anything_starts(tmp_path, monkeypatch, package, monitor):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"monitor.x needs the package {package}"):
        monitor().check("monitor.x")
    with pytest.raises(ConfigError, match=f"package {package}"):
        monitor().start(tmp_path, max_steps=4, run_config={})
