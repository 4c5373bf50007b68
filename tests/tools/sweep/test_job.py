"""What becomes of one job of a sweep, whatever state it is found in and however it ends. No run is started."""

import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict, read_write

from prl.base.errors import ConfigError, PrlError
from prl.config.compose import CONF
from prl.monitors.log import hold_log, log_to
from prl.runs.result import RunResult, write_result
from prl.tools.sweep.command import summary
from prl.tools.sweep.job import isolated, run_job, status_of


@pytest.fixture(scope="module")
def composed():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", ["run.name=s", "seed=3"], return_hydra_config=True)


@pytest.fixture
def job(composed, tmp_path, monkeypatch):
    """`job(main)`: the job seed=3 of the sweep in `tmp_path`, run by `main`."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    config = composed.copy()
    folder = tmp_path / "seed=3"
    with read_write(config), open_dict(config):
        config.hydra.runtime.output_dir = str(folder)
    HydraConfig.instance().set_config(config)

    def run(main, *changes):
        folder.mkdir(exist_ok=True)  # as Hydra does
        cfg = config.copy()
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        for key, value in changes:
            OmegaConf.update(cfg, key, value)
        return run_job(cfg, main)

    run.folder = folder
    return run


def completes(reward=0.5):
    def main(config, **_):
        folder = Path(config.run.dir)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "eval/math/avg@1": reward}) + "\n")
        result = RunResult(status="completed", steps=1)
        write_result(folder, result)
        return result

    return main


def fails(error, status=None):
    def main(config, **_):
        if status is not None:
            write_result(Path(config.run.dir), RunResult(status=status, error=str(error)))
        raise error

    return main


def never(config, **_):
    raise AssertionError("it is not run")


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_job_runs_in_its_folder_and_returns_its_metric(job):
    seen = []
    assert job(lambda config, **_: seen.append(config) or completes(0.25)(config)) == 0.25
    assert (seen[0].run.dir, seen[0].run.name, seen[0].seed) == (str(job.folder), "seed=3", 3)
    assert result(job.folder)["optimized_metric"] == 0.25


def test_a_search_does_not_run_a_job_without_an_objective(job, capsys):
    """Of imitation without evaluation; a grid runs it all the same, and its summary leaves it out."""
    imitation = (("algo.sampling.source", "demonstrations"), ("orchestrator.eval.every", None))
    with read_write(HydraConfig.get()), open_dict(HydraConfig.get()):
        HydraConfig.get().sweeper = OmegaConf.create({"direction": "maximize"})
    assert job(never, *imitation) is None and result(job.folder)["status"] == "refused"
    says = "those of demonstrations, not the policy's: evaluate the run (orchestrator.eval.every=5)"
    assert says in capsys.readouterr().err
    assert job(completes(0.25)) == 0.25


def test_completed_job_is_skipped_with_its_recorded_metric(job, capsys):
    assert job(completes(0.25)) == job(never) == 0.25
    assert "job seed=3: completed already: skipped" in capsys.readouterr().err
    assert job(never, ("optimized_metric.key", "loss/mean")) is None
    assert "optimized_metric.key='loss/mean'" in capsys.readouterr().err
    assert result(job.folder)["optimized_metric"] is None and status_of(job.folder) == "completed"


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_killed_job_restarts_or_resumes(job, capsys, resume):
    kept = job.folder / "checkpoints" / "step_000010" / "manifest.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    found = []
    job(lambda config, **_: found.append(kept.exists()) or completes()(config), ("run.resume", resume))
    assert found == [resume == "auto"]
    assert ("crashed before: goes on from its last checkpoint" in capsys.readouterr().err) == (resume == "auto")


def test_a_job_whose_result_cannot_be_read_is_done_again(job, capsys):
    job(completes(0.25))
    (job.folder / "result.json").write_text('{"status": "comp')
    assert status_of(job.folder) == "crashed" and "crashed" in "".join(summary(job.folder.parent))
    assert job(completes(0.5)) == 0.5 and "crashed before: done again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "written", "status", "line"),
    [
        (ConfigError("max_steps must be at least 1"), None, "refused", "refused: max_steps must be at least 1"),
        (PrlError("the engine died"), "failed", "failed", "failed: the engine died"),
        (ValueError("odd\nin detail"), None, "failed", "failed: ValueError: odd ("),
        (SystemExit(0), None, "failed", "failed: SystemExit: 0 ("),
    ],
    ids=str,
)
def test_failed_job_is_a_line_and_a_record(job, capsys, error, written, status, line):
    assert job(fails(error, written)) is None
    printed = capsys.readouterr().err
    assert f"job seed=3: {line}" in printed and printed.count("\n") == 1
    assert result(job.folder)["status"] == status and str(error) in result(job.folder)["error"]


def test_incomplete_job_runs_again_keeping_its_files(job, tmp_path):
    for count, (error, status) in enumerate([(PrlError("a"), "failed"), (PrlError("b"), "failed"), (None, None)]):
        job(fails(error, status) if error else completes())
        assert len(list(tmp_path.glob("earlier/seed=3.failed-*"))) == count
    assert status_of(job.folder) == "completed"
    assert result(tmp_path / "earlier" / "seed=3.failed-1")["error"] == "a"
    assert result(tmp_path / "earlier" / "seed=3.failed-2")["error"] == "b"


def test_a_job_that_another_process_runs_is_left_alone(job, capsys):
    job.folder.mkdir()
    script = (
        "import pathlib, sys; from prl.runs.owner import owned\n"
        f"with owned(pathlib.Path({str(job.folder)!r})): print('owns', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"owns\n"
        assert job(never) is None
        assert "left alone" in capsys.readouterr().err
        other.kill()
        other.wait()
    assert job(completes()) == 0.5, "a lock ends with its process"


def test_an_interrupt_stops_the_sweep(job):
    with pytest.raises(SystemExit) as end:  # any other exception would be one failed job to Hydra
        job(fails(KeyboardInterrupt(), "stopped"))
    assert end.value.code == 130 and status_of(job.folder) == "stopped"


def test_nothing_of_a_job_is_left_to_the_next(tmp_path, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    logging.captureWarnings(False)  # a test before it may have left that on
    before = signal.getsignal(signal.SIGTERM)
    for number in (1, 2):
        with isolated():
            log_to(tmp_path / f"{number}.log", hold_log())
            warnings.simplefilter("default")
            warnings.warn("as often as there are jobs", stacklevel=1)
            os.environ["OF_A_JOB"] = "1"
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            logging.getLogger("prl").info("job %s", number)
        assert root.handlers == [] and "OF_A_JOB" not in os.environ and signal.getsignal(signal.SIGTERM) is before
    for number in (1, 2):
        log = (tmp_path / f"{number}.log").read_text()
        assert log.count("UserWarning: as often") == 1 and log.count("INFO prl: job") == 1 and f"job {number}" in log
