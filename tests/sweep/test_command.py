"""A sweep's command, around its jobs: what it refuses, what it records, the table, and stopping. No run is started."""

import os
import subprocess
import sys
import time

import pytest
from hydra import compose, initialize_config_dir

from prl.compose import CONF
from prl.errors import ConfigError
from prl.result import RunResult
from prl.sweep.command import (
    Recorder,
    SweepRecord,
    checked,
    prepared,
    read_record,
    run,
    stop_jobs,
    summary,
)
from prl.sweep.job import held, longest_grace_s, write_result


def config_of(*overrides):
    """The config of a sweep as Hydra has it before the first job."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", ["run.name=s", *overrides], return_hydra_config=True)
    config.hydra.overrides.task = ["algo=grpo,max_rl", *(each for each in overrides if not each.startswith("hydra"))]
    return config


@pytest.fixture
def finished(tmp_path):
    """A sweep with a completed job."""
    with held(tmp_path / ".locks" / "algo=grpo"):
        write_result(tmp_path / "algo=grpo", RunResult(status="completed", seconds=12.4, optimized_metric=0.25))
    return tmp_path


def recorded(folder, **what):
    record = SweepRecord(**({"varied": ["algo"], "fixed": {"seed": "1"}, "commands": [{"arguments": ["-m"]}]} | what))
    return lambda *_: record


REFUSED = "orchestrator.batch_size=33"
"""No multiple of the group's size: a job is refused before an engine starts."""


@pytest.fixture
def sweep(run_command, tmp_path):
    return lambda *overrides: run_command(tmp_path, "prl.train", "-m", *overrides)


@pytest.mark.parametrize(
    "override", ["run.name=${algo.no_such}", "model.path=${oc.env:NO_SUCH}", "max_steps=${.nothing}"]
)
def test_an_interpolation_that_resolves_in_no_job_or_only_there_is_a_sweep_like_any_other(sweep, tmp_path, override):
    done = sweep("seed=0,1", REFUSED, override)
    (folder,) = (tmp_path / "outputs").iterdir()
    assert done.returncode == 1 and "Callback" not in done.stderr, done.stderr
    assert read_record(folder).varied == ["seed"]
    assert done.stderr.count("refused") == 4, "a line and a row of the table each"


def test_a_value_that_cannot_be_leaves_a_sweep_as_it_was(sweep, tmp_path):
    done = sweep("seed=0,x", REFUSED, "run.name=s")
    assert done.returncode == 2 and "error: Error merging override seed=x: Value" in done.stderr, done.stderr
    assert "sweep" not in done.stderr and "summary" not in done.stderr and not (tmp_path / "outputs" / "s").exists()
    assert sweep("seed=0", REFUSED, "run.name=s").returncode == 1
    record = read_record(tmp_path / "outputs" / "s")
    assert "sweep:" not in sweep("seed=0,x", REFUSED, "run.name=s").stderr
    assert read_record(tmp_path / "outputs" / "s") == record and len(record.commands) == 1


@pytest.fixture
def ends(finished, monkeypatch, capsys):
    """`ends(hydra, *overrides)`: the status of a sweep in a directory with a job, and what it says."""
    monkeypatch.setattr("prl.sweep.command.signal.signal", lambda *_: None)

    def end(hydra, *overrides):
        monkeypatch.setattr("prl.sweep.command.command.run", lambda *_: hydra())
        with pytest.raises(SystemExit) as exit:
            run(None, ["-m", f"hydra.sweep.dir={finished}", *overrides])
        return exit.value.code, capsys.readouterr().err

    return end


def begins(folder):
    def hydra():
        with held(folder / ".locks" / "algo=grpo"):
            pass

    return hydra


def test_a_refused_sweep_says_nothing_but_why(ends, finished):
    def refused():
        checked(config_of(), finished)  # it looks at the jobs
        raise SystemExit(2)

    assert ends(refused) == (2, "")
    status, said = ends(begins(finished))
    assert status == 0 and "algo=grpo  completed" in said


def test_an_interrupt_while_the_summary_is_written_is_one_line(ends, finished, monkeypatch):
    def interrupted(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("prl.report.sweep.write_summary", interrupted)
    status, said = ends(begins(finished))
    assert status == 130 and said.endswith(f"stopped: no summary; prl report {finished} writes it\n")


def test_a_directory_on_a_disk_that_is_not_mounted_is_refused(tmp_path):
    (tmp_path / "disk").symlink_to("/nonexistent/disk")
    with pytest.raises(ConfigError, match="^hydra.sweep.dir='.*disk/x' cannot be made: .*/disk is a link to '/nonexis"):
        checked(config_of(), tmp_path / "disk" / "x")


def test_a_directory_of_a_run_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="already holds a run: choose another run.name"):
        checked(config_of(), tmp_path)


@pytest.mark.parametrize(
    ("damage", "status", "says"),
    [
        (lambda record: record.mkdir(), 2, "sweep.json is damaged"),
        (lambda record: record.with_name(f".sweep.json.{os.getpid()}").mkdir(), 1, "no sweep.json can be written"),
        (lambda record: record.write_text("{"), 2, "sweep.json is damaged"),
        (lambda record: record.write_bytes(b'{"varied": ["\xe1bc"], "fixed": {}}'), 2, "sweep.json is damaged"),
    ],
    ids=["a folder", "not writable", "cut off", "no text"],
)
def test_a_record_that_is_none_stops_the_sweep_before_its_jobs(tmp_path, capsys, damage, status, says):
    damage(tmp_path / "sweep.json")
    with pytest.raises(SystemExit) as exit:  # Hydra would only warn of another exception
        Recorder().on_multirun_start(config_of(f"hydra.sweep.dir={tmp_path}"))
    assert exit.value.code == status and says in capsys.readouterr().err


def test_a_new_sweep_is_recorded_and_the_same_one_again_keeps_its_commands(finished, monkeypatch):
    assert checked(config_of("seed=1"), finished) == SweepRecord(["algo"], {"seed": "1"})
    monkeypatch.setattr("prl.sweep.command.read_record", recorded(finished))
    assert checked(config_of("seed=1", "sweep=joblib"), finished).commands == [{"arguments": ["-m"]}]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"fixed": {"seed": "2"}}, r"sets \{'seed': '2'\}, not \{'seed': '1'\}: choose another run.name"),
        ({"varied": ["algo", "loss"]}, r"varies \['algo', 'loss'\], not \['algo'\]"),
    ],
)
def test_a_directory_with_results_of_other_settings_is_refused(finished, monkeypatch, what, says):
    monkeypatch.setattr("prl.sweep.command.read_record", recorded(finished, **what))
    with pytest.raises(ConfigError, match=says):
        checked(config_of("seed=1"), finished)
    write_result(finished / "algo=grpo", RunResult(status="refused"))
    assert checked(config_of("seed=1"), finished).fixed == {"seed": "1"}, "nothing there that could be mistaken"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["sweep=submitit_local", "sweep.share_engine=true"],
            "sweep.share_engine=true: a job of submitit has a process",
        ),
        (["run.resume=some/run"], "run.resume=<run> goes on with one run: leave out -m"),
        (["hydra/sweeper=optuna"], "hydra.sweeper.direction=minimize, but optimized_metric.direction=maximize"),
    ],
    ids=str,
)
def test_what_a_sweep_cannot_do_is_refused_before_its_first_job(tmp_path, overrides, says):
    with pytest.raises(ConfigError, match=says):
        checked(config_of(*overrides), tmp_path)


def test_a_launcher_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("prl.sweep.command.spec_of", lambda module: None)
    with pytest.raises(ConfigError, match=r"needs the package hydra_joblib_launcher, .* pip install 'prl\[sweep\]'"):
        checked(config_of("sweep=joblib"), tmp_path)


def test_hydra_gets_one_directory_for_all_jobs_and_what_names_none_of_them():
    added = ["hydra.sweep.dir='outputs/x'", "hydra.job.config.override_dirname.exclude_keys=['max_steps','run.name']"]
    typed = ["algo=grpo,max_rl", "max_steps=3", "run.name=x", "hydra.launcher.n_jobs=2"]
    for before, after in ((["-m"], []), ([], ["-m"])):
        folder, arguments = prepared([*before, *typed, *after])
        assert str(folder) == "outputs/x"
        assert arguments == [*before, *added, *typed, *after], "overrides stand in one stretch, as Hydra wants them"
    assert prepared(["-m"])[1][0] == "-m"


def test_the_table_has_every_job_and_the_errors_a_line_each(finished):
    traceback = "Traceback (most recent call last):\n  File\nValueError: odd\n"
    for name, result in {
        "algo=max_rl": RunResult(status="refused", error="algo.x: there is no such knob"),
        "algo=opd": RunResult(status="failed", error=traceback, seconds=3.2),
        "algo=sft": None,
    }.items():
        with held(finished / ".locks" / name):
            if result is not None:
                write_result(finished / name, result)
    with held(finished / ".locks" / "algo=sft"):
        pass
    assert summary(finished) == [
        "job          status       metric  seconds",
        "algo=grpo    completed    0.2500  12",
        "algo=max_rl  refused              0",
        "algo=opd     failed               3",
        "algo=sft     not started",
        "algo=max_rl: algo.x: there is no such knob",
        "algo=opd: ValueError: odd",
    ]


@pytest.mark.parametrize("deaf", [False, True])
def test_jobs_in_other_processes_are_stopped_and_ended_if_they_do_not(tmp_path, monkeypatch, deaf):
    monkeypatch.setattr("prl.sweep.command.STOP_S", 1.0)
    (tmp_path / ".locks").mkdir()
    script = (
        "import fcntl, os, signal, socket, time\n"
        f"file = open({str(tmp_path / '.locks' / 'job')!r}, 'a+'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "file.write(f'{os.getpid()} {socket.gethostname()}\\n'); file.flush()\n"
        + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if deaf else "")
        + "print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as job:
        assert job.stdout.readline() == b"held\n"
        started = time.monotonic()
        stop_jobs(tmp_path, 0.0)
        assert job.wait(5) == (-9 if deaf else -15)
        assert time.monotonic() - started < 5


def test_jobs_have_the_longest_grace_that_one_of_them_has(tmp_path):
    assert longest_grace_s(tmp_path) == 0.0
    for name, grace in (("a", "5.0"), ("b", "60.0"), ("c", "null")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"checkpoint:\n  grace_s: {grace}\n")
    assert longest_grace_s(tmp_path) == 60.0


def test_a_config_that_cannot_be_read_keeps_no_job_from_being_asked_to_stop(tmp_path):
    texts = (
        "checkpoint:\n  grace_s: 5.0\n",
        "---\ncheckpoint:\n  grace_s: 9",
        "checkpoint: {grace_s: '",
        "\0",
        "",
        "1",
    )
    for number, text in enumerate(texts):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.yaml").write_text(text)
    assert longest_grace_s(tmp_path) == 5.0


def test_a_directory_without_a_record_has_none(tmp_path):
    assert read_record(tmp_path) is None
