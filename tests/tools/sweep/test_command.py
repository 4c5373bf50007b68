"""A sweep's command, around its jobs: what it refuses, what it records, the table, and stopping. No run is started."""

import logging
import signal
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from prl import train
from prl.base.errors import ConfigError
from prl.config.compose import CONF
from prl.launch import command as launch_command
from prl.runs.result import RunResult, write_result
from prl.tools.sweep.command import Recorder, SweepRecord, checked, read_record, run, summary


@pytest.fixture(autouse=True)
def loggers_as_before():
    """Hydra switches all loggers off that are there, and other tests read what is logged."""
    known = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    disabled = [each.disabled for each in known]
    level = logging.root.level
    yield
    for each, was in zip(known, disabled, strict=True):
        each.disabled = was
    logging.root.setLevel(level)


def config_of(*overrides):
    """The config of a sweep as Hydra has it before the first job."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", ["run.name=s", *overrides], return_hydra_config=True)
    config.hydra.overrides.task = ["algo=grpo,max_rl", *(each for each in overrides if not each.startswith("hydra"))]
    return config


def made(folder, **result):
    folder.mkdir(parents=True, exist_ok=True)
    write_result(folder, RunResult(**result))


@pytest.fixture
def finished(tmp_path):
    """A sweep with a completed job."""
    made(tmp_path / "algo=grpo", status="completed", seconds=12.4, optimized_metric=0.25)
    return tmp_path


def test_a_damaged_record_stops_the_sweep_before_its_jobs(tmp_path, capsys):
    (tmp_path / "sweep.json").write_bytes(b"{")
    with pytest.raises(SystemExit) as caught:  # Hydra would only warn of another exception
        Recorder().on_multirun_start(config_of(f"hydra.sweep.dir={tmp_path}"))
    assert caught.value.code == 2 and "sweep.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fixed", "varied", "key"),
    [({"seed": "2"}, ["algo"], "seed"), ({"seed": "1"}, ["algo", "loss"], "loss"), ({"seed": "1"}, ["algo"], None)],
)
def test_a_directory_with_results_of_other_settings_is_refused(finished, monkeypatch, fixed, varied, key):
    before = SweepRecord(varied, fixed)
    monkeypatch.setattr("prl.tools.sweep.command.read_record", lambda _: before)
    if key is None:
        assert checked(config_of("seed=1", "sweep=joblib"), finished)[0] == before
        return
    with pytest.raises(ConfigError, match=key):
        checked(config_of("seed=1"), finished)
    made(finished / "algo=grpo", status="refused")
    assert checked(config_of("seed=1"), finished)[0].fixed == {"seed": "1"}, "nothing there that could be mistaken"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["run.resume=some/run"], "run.resume"),
        (["dry_run=true"], "dry_run=true"),
        (["hydra/sweeper=optuna"], "optimized_metric.direction"),
    ],
    ids=str,
)
def test_impossible_sweep_is_refused_before_its_first_job(tmp_path, overrides, key):
    with pytest.raises(ConfigError, match=key):
        checked(config_of(*overrides), tmp_path)


def test_jobs_get_directory_and_fixed_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prl.tools.sweep.command.signal.signal", lambda *_: None)
    monkeypatch.setattr(Recorder, "folder", None)
    config = config_of("max_steps=3", "seed=4")
    config.hydra.sweeper.params = {"seed": "1,2", "curriculum": "default,pools"}
    Recorder().on_multirun_start(config)
    assert Recorder.folder == Path("outputs/s")
    excluded = "hydra.job.config.override_dirname.exclude_keys=['seed','max_steps']"
    assert config.hydra.overrides.hydra[-2:] == [f"hydra.sweep.dir='{tmp_path}/outputs/s'", excluded]
    assert read_record(Path("outputs/s")).varied == ["algo", "curriculum"], "what is typed wins: no seed"


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """`sweep(*arguments)`: the status of `prl train -m`, in this process, and what it prints on standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(launch_command, "_started", False)
    monkeypatch.setattr(Recorder, "folder", None)
    monkeypatch.setenv(launch_command.FULL_ERROR, "1")

    def run_(*arguments):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["prl train", "-m", *arguments])
        with pytest.raises(SystemExit) as end:
            run(train._job, ["-m", *arguments])
        return end.value.code, capsys.readouterr().err

    yield run_
    GlobalHydra.instance().clear()


def test_jobs_that_are_refused_are_recorded_and_asked_again(sweep, tmp_path):
    folder = tmp_path / "outputs" / "s"
    made(folder / "seed=0", status="refused")
    status, printed = sweep("seed=0,1", "orchestrator.batch_size=33", "run.name=s")  # no multiple of the group's size
    assert status == 1 and printed.count("refused") >= 4, "a line and a row of the table each"
    assert "outputs/s/summary.html" in printed and (folder / "summary.html").exists()
    assert read_record(folder).varied == ["seed"]
    assert [path.name for path in (folder / "earlier").iterdir()] == ["seed=0.failed-1"]


def test_sweep_without_ray_is_refused(sweep, tmp_path, monkeypatch):
    address = "hydra.launcher.ray.init.address=127.0.0.1:1"
    status, printed = sweep("seed=0,1", "sweep=ray", address)
    assert status == 2 and "127.0.0.1:1: " in printed and printed.count("\n") == 1 and not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    status, printed = sweep("seed=0,1", "sweep=ray")
    assert status == 2 and "prl[ray]" in printed and printed.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_table_has_every_job_and_error(finished):
    made(finished / "algo=max_rl", status="refused", error="algo.x: there is no such option")
    made(finished / "algo=opd", status="failed", error="Traceback (most recent call last):\n  File\nValueError: odd\n")
    (finished / "algo=sft").mkdir()
    (finished / "earlier").mkdir()
    assert summary(finished) == [
        "job          status       metric  seconds",
        "algo=grpo    completed    0.2500  12",
        "algo=max_rl  refused              0",
        "algo=opd     failed               0",
        "algo=sft     not started          0",
        "algo=max_rl: algo.x: there is no such option",
        "algo=opd: ValueError: odd",
    ]
