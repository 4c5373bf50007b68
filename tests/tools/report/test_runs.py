"""A run directory read back."""

import json
import math
import shutil
from pathlib import Path

import pytest

from prl.base.errors import ConfigError
from prl.config.run_yaml import flat
from prl.runs.owner import owned
from prl.tools.report import page
from prl.tools.report.runs import find_runs, read_run
from prl.tools.report.verdict import starts
from prl.tools.sweep.command import jobs


def test_a_finished_run(tmp_path, write_run):
    lines = [{"step": 0, "eval/math/avg@1": 0.25}, {"step": 1, "reward/all/mean": 0.5, "lr": None}]
    config = "seed: 3\nalgo: {_target_: os.system, lr: 0.0005}\nfilters: {}\nlist: [1, 2]\n"
    result = {"status": "completed", "steps": 1, "seconds": 2.5, "metrics": {"lr": None}, "unknown": 1}
    run = read_run(write_run(tmp_path / "a", lines, config, result, "- seed=3\n- algo.lr=5e-4\n"))
    assert (run.dir.name, run.status, run.result.seconds, run.problems) == ("a", "completed", 2.5, [])
    assert run.overrides == ["seed=3", "algo.lr=5e-4"]
    assert flat(run.config) == {"seed": 3, "algo._target_": "os.system", "algo.lr": 5e-4, "filters": {}, "list": [1, 2]}
    assert list(run.metrics.index) == [0, 1]
    assert run.metrics.loc[0, "eval/math/avg@1"] == 0.25
    assert math.isnan(run.metrics.loc[0, "reward/all/mean"]) and math.isnan(run.metrics.loc[1, "lr"])


def test_broken_lines_are_left_out_and_counted(tmp_path, write_run):
    path = write_run(tmp_path / "a") / "metrics.jsonl"
    path.write_bytes(b'{"step":0,"a":1}\n\x00\x00\n{"a":2}\n{"step":2,"a":"x"}\n\n{"step":3,"a":4}\n{"step":4,"a":')
    run = read_run(path.parent)
    assert run.metrics["a"].to_dict() == {0: 1, 3: 4}
    assert run.problems == [f"{path}: 2 lines cannot be read"], "the last is being written"


def test_of_lines_of_one_step_the_last_values_count(tmp_path, write_run):
    lines = [{"step": 1, "a": 1, "b": 1}, {"step": 2, "a": 5}, {"step": 1, "a": 2}]
    metrics = read_run(write_run(tmp_path / "a", lines)).metrics
    assert metrics["a"].to_dict() == {1: 2, 2: 5} and metrics.loc[1, "b"] == 1


def test_files_that_are_missing_or_broken(tmp_path, write_run):
    (tmp_path / "result.json").write_text('{"status": "refused", "error": "no such model"}')
    run = read_run(tmp_path)
    assert (run.status, run.result.error, run.config, run.overrides) == ("refused", "no such model", {}, [])
    assert run.metrics.empty and run.metrics.index.name == "step" and run.problems == []
    (tmp_path.parent / "sweep.json").write_text('{"fixed": 5}')
    write_run(tmp_path, config="a: [1", overrides="a: 1").joinpath("result.json").write_text('{"status":')
    run = read_run(tmp_path)
    (tmp_path.parent / "sweep.json").unlink()
    assert run.status == "crashed" and run.result.steps == 0
    named = [problem.split()[0].rsplit("/", 1)[1] for problem in run.problems]
    assert sorted(named) == ["config.yaml", "overrides.yaml", "result.json", "sweep.json"]


def test_a_file_that_may_not_be_read_is_a_problem(tmp_path, write_run, monkeypatch):
    run_dir = write_run(tmp_path / "a", ['{"step": 1, "a": 2}'])

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    run = read_run(run_dir)
    assert run.metrics.empty and f"{run_dir / 'metrics.jsonl'} cannot be read: Permission denied" in run.problems


def test_run_without_result_runs_while_its_process_lives(tmp_path, write_run):
    folder = write_run(tmp_path / "a", [{"step": 7}])
    assert (read_run(folder).status, read_run(folder).result.steps) == ("crashed", 7)
    with owned(folder):
        assert read_run(folder).status == "running"
    assert read_run(folder).status == "crashed"


def test_run_that_has_a_result_from_its_start_runs_while_its_process_lives(tmp_path, write_run):
    folder = write_run(tmp_path / "a", [{"step": 7}], result={"status": "failed", "error": "no word"})
    assert (read_run(folder).status, read_run(folder).result.steps) == ("failed", 7)
    with owned(folder):
        assert (read_run(folder).status, read_run(folder).result.steps) == ("running", 7)
        write_run(folder, result={"status": "completed", "steps": 9, "seconds": 0.5})
        assert read_run(folder).status == "completed", "its page is written while it still has its directory"


def test_runs_below_are_listed_without_those_moved_aside(tmp_path, write_run):
    for name in ("10-b", "2-a", "2-a.failed-1", "earlier/2-a.stopped-12", ".trash", "2-a/inner", "x/y"):
        write_run(tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert [path.relative_to(tmp_path).as_posix() for path in find_runs([tmp_path])] == ["2-a", "10-b", "x/y"]
    named = [tmp_path / name for name in ("10-b", "2-a.failed-1", "10-b")]
    assert [path.name for path in find_runs(named)] == ["10-b", "2-a.failed-1"]


def test_runs_are_listed_by_the_numbers_in_their_names(tmp_path, write_run):
    names = ["lr=1e-05,seed=2", "lr=1e-05,seed=10", "lr=0.0001,seed=0", "lr=0.5", "lr=2", "lr=10", "lr=x"]
    for name in sorted(names):
        write_run(tmp_path / name, result={"status": "completed"})
    assert [path.name for path in find_runs([tmp_path])] == names == [path.name for path in jobs(tmp_path)]


def test_folder_without_a_run_is_refused(tmp_path):
    (tmp_path / "curves.csv").touch()
    for folder in (tmp_path, tmp_path / "a", tmp_path / "curves.csv"):
        for read in (read_run, lambda folder: find_runs([folder])):
            with pytest.raises(ConfigError, match=str(folder)):
                read(folder)


def test_job_of_a_sweep_knows_what_it_varies(tmp_path, write_run):
    """What the sweep's own config varies, too: everything typed for the job that is not the same for all."""
    typed = '["optim.lr=0.1", "+max=1", "algo=grpo", "~filters.x"]'
    alone = read_run(write_run(tmp_path / "a", overrides=typed))
    (tmp_path / "sweep.json").write_text('{"varied": ["max"], "fixed": {"algo": "grpo", "~filters.x": "null"}}')
    assert (alone.searched, read_run(tmp_path / "a").searched) == ([], ["optim.lr", "max"])


def forked(folder, step, checkpoint):
    """A run that went on from a checkpoint of this step."""
    (folder / "resumes.jsonl").write_text(json.dumps({"step": step, "checkpoint": str(checkpoint), "at": "now"}) + "\n")
    return folder


def rewards(steps, value):
    return [{"step": step, "reward/all/mean": value} for step in steps]


@pytest.mark.parametrize("checkpoint", ["/nowhere/checkpoints/step_000003", "/" + "x" * 300 + "/a/b", "/a\0/b/c"])
def test_a_fork_of_what_no_folder_can_be_is_read(tmp_path, write_run, checkpoint):
    found = read_run(forked(write_run(tmp_path / "run", rewards(range(5, 8), 2.0)), 4, Path(checkpoint)))
    assert list(found.whole.index) == [5, 6, 7] and len(found.problems) == 1


def test_a_fork_begins_where_it_did_though_its_first_lines_are_lost(tmp_path, write_run):
    first = write_run(tmp_path / "first", rewards(range(9), 1.0))
    second = write_run(tmp_path / "second", rewards(range(6, 8), 2.0))
    found = read_run(forked(second, 3, first / "checkpoints" / "step_000003"))
    assert list(found.whole.index) == [0, 1, 2, 3, 6, 7]


def test_a_fork_begins_with_the_curve_of_its_source(tmp_path, write_run):
    first = write_run(tmp_path / "first", rewards(range(9), 1.0))
    second = write_run(tmp_path / "second", rewards(range(5, 8), 2.0))
    third = write_run(tmp_path / "third", rewards(range(7, 10), 3.0))
    forked(second, 4, first / "checkpoints" / "step_000004")
    found = read_run(forked(third, 6, second / "checkpoints" / "step_000006"))
    assert found.whole["reward/all/mean"].to_dict() == dict.fromkeys(range(5), 1) | {5: 2, 6: 2, 7: 3, 8: 3, 9: 3}
    assert list(found.metrics.index) == [7, 8, 9] and found.problems == []
    assert page.drawn(found.before)["reward/all/mean"] == ([*range(7)], [1, 1, 1, 1, 1, 2, 2]), "the page of the run"
    shutil.rmtree(first)
    found = read_run(third)
    assert list(found.whole.index) == [5, 6, 7, 8, 9]
    assert found.problems == [f"{first}, which it forked, cannot be read: curves begin at step 5"]


def test_a_damaged_line_of_a_resume_is_left_out(tmp_path, write_run):
    run_dir = write_run(tmp_path / "a", ['{"step": 1, "a": 2}'])
    lines = [{"step": 1, "checkpoint": "x", "changed": changed} for changed in ({"a": 5}, {"a": []}, {"a": [1, 2]})]
    (run_dir / "resumes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [finding.text for finding in starts(read_run(run_dir))] == ["Resumed after step 1 with a=2 (before 1)."]


def test_a_run_that_was_resumed_is_no_fork(tmp_path, write_run):
    found = read_run(forked(write_run(tmp_path / "a", rewards(range(1, 9), 1.0)), 4, "checkpoints/step_000004"))
    assert list(found.whole.index) == list(range(1, 9)) and found.problems == []


def test_a_run_that_forks_itself_ends(tmp_path, write_run):
    """One that has taken the name of the run that it forked."""
    found = read_run(
        forked(write_run(tmp_path / "a", [{"step": 3}]), 2, tmp_path / "a" / "checkpoints" / "step_000002")
    )
    assert list(found.whole.index) == [3]
