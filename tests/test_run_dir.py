"""A run directory: who may begin a run in it, what is left of how it ended."""

import re
import stat
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from prepared_run import run_dir_of

from prl.base.errors import ConfigError, PrlError
from prl.config.build import plain
from prl.config.compose import compose
from prl.runs.owner import owned
from prl.runs.result import RunResult
from prl.runs.run_dir import recorded, refuse_existing, refuse_other_files, remove_early


def test_of_simultaneous_runs_one_gets_the_directory(tmp_path):
    config, ready = compose(["run.name=x", f"run.dir={tmp_path}/x"]), Barrier(8)

    def begin(_):
        ready.wait(10)
        try:
            return run_dir_of(config)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(begin, range(8)))
    assert found.count(tmp_path / "x") == 1
    refusal = f"run.dir='{tmp_path}/x' already holds a run: choose another run.name, remove it, or go on with it"
    assert sum(str(each).startswith(refusal) for each in found) == 7
    assert plain(compose([f"run.dir={tmp_path}/x", "run.name=x"], tmp_path / "x")) == plain(config)


def test_it_is_its_owners_alone(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir(mode=0o755)
    run_dir_of(compose(["run.name=x", f"run.dir={folder}"]))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("file", ["config.yaml", "metrics.jsonl", "result.json"])
def test_a_directory_of_a_run_is_refused(tmp_path, file):
    (tmp_path / file).touch()
    with pytest.raises(ConfigError, match="already holds a run"):
        refuse_existing(tmp_path)


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        (["notes.md"], "notes.md"),
        (["logs/a", "checkpoints/b"], "checkpoints, logs"),  # folders that a run has, too
        (["a", "b", "c", "d"], "a, b, c, …"),
    ],
)
def test_a_directory_with_somebodys_files_becomes_no_run(tmp_path, files, shown):
    folder = tmp_path / "x"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    config = compose(["run.name=x", f"run.dir={folder}"])
    for refused in (lambda: refuse_other_files(folder), lambda: run_dir_of(config)):
        with pytest.raises(ConfigError, match=re.escape(f"run.dir='{folder}' holds other files ({shown})")):
            refused()
    assert not (folder / "config.yaml").exists()


def test_a_refused_start_leaves_nothing_and_a_killed_one_blocks_no_other(tmp_path):
    run, theirs = tmp_path / "new" / "run", tmp_path / "theirs"
    for folder in (run / "pictures", run / "logs", theirs / "pictures"):
        folder.mkdir(parents=True)
        (folder / "engine.log").touch()
    refuse_other_files(run)
    remove_early(run, [run / "pictures", run, run.parent])
    remove_early(theirs, [])
    assert not run.parent.exists() and list((theirs / "pictures").iterdir()), "those were there before"


def test_files_older_than_a_config_block_no_run(tmp_path):
    with owned(tmp_path / "x"):
        pass
    for left in (".config.yaml.123", "logs", ".hydra"):
        (tmp_path / "x" / left).mkdir()
    run_dir_of(compose(["run.name=x", f"run.dir={tmp_path}/x"]))


def test_a_directory_that_was_removed_is_not_made_again(tmp_path):
    with pytest.raises(PrlError, match="gone"), recorded(tmp_path / "x", RunResult(), 0.0):
        raise PrlError("gone")
    assert not (tmp_path / "x").exists()


def test_exit_of_user_code_is_a_failure_with_line(tmp_path):
    result = RunResult()
    printed = rf"^the run was ended from within: SystemExit: 0 \({__file__}, line \d+\)$"
    with pytest.raises(PrlError, match=printed), recorded(tmp_path, result, 0.0):
        raise SystemExit(0)
    assert result.status == "failed" and result.error.startswith("the run was ended from within")
