"""The list of runs, without a page."""

import json
import shutil
import time

import pytest
from made_run import make_run

from prl.runs.owner import owned
from prl.tools.watch import listing
from prl.tools.watch.listing import entries, find


def listed(*folders):
    """The entries of the list, by name."""
    return {entry.name: entry for entry in entries(find(folders))}


def test_a_folder_without_runs_has_none_until_one_begins(tmp_path):
    assert listed(tmp_path / "outputs") == {}
    make_run(tmp_path / "outputs" / "sweep 1" / "seed=0", steps=1, rollouts=2)
    assert set(listed(tmp_path / "outputs")) == {"sweep 1/seed=0"}


def test_a_run_or_several_folders_are_watched_and_equal_names_are_told_apart(tmp_path):
    for where in ("x", "y"):
        make_run(tmp_path / where / "run", steps=1, rollouts=2)
    assert set(listed(tmp_path / "x" / "run")) == {"run"}
    assert set(listed(tmp_path / "x", tmp_path / "y")) == {"run", str(tmp_path / "y" / "run")}


def test_what_became_of_a_run(folder, append):
    done, gone, at_work = listed(folder)["a"], folder / "b", folder / "c"
    assert (done.status, done.step, done.max_steps, done.remarks) == ("completed", 3, 3, [])
    (gone / "result.json").unlink()
    shutil.copytree(gone, at_work)
    append(at_work, {"step": 5, "reward/all/mean": 0.12344, "grad_norm": None})
    append(at_work, '{"step": 6, "reward/all/', end="")
    with owned(at_work):
        found = listed(folder)
    assert found["b"].status == "crashed"
    running = found["c"]
    assert (running.status, running.step, running.reward) == ("running", 5, 0.1234)
    assert running.remarks == ["not finite: grad_norm"]
    (gone / "result.json").write_text(
        json.dumps({"status": "failed", "error": "no\x1b[2J room\nsecond line", "steps": 3})
    )
    assert listed(folder)["b"].remarks == [r"no\x1b[2J room"]


@pytest.mark.parametrize(
    ("source", "reward"), [("policy", 0.5), ("demonstrations", None), ("{name: t}", None), ("\n      name: t", None)]
)
def test_rewards_that_are_not_the_policys_are_left_out(folder, append, source, reward):
    config = (folder / "b" / "config.yaml").read_text() + f"algo:\n  sampling:\n    source: {source}\n"
    (folder / "b" / "config.yaml").write_text(config + "envs:\n  math:\n    algo: null\n")
    append(folder / "b", {"step": 4, "reward/all/mean": 0.5})
    assert listed(folder)["b"].reward == reward


def test_aliases_of_aliases_do_not_stop_the_list(folder):
    """Written out they are 9 ** 8 words."""
    names = "abcdefgh"
    lines = [
        f"{name}: &{name} [{', '.join([f'*{last}' if last else 'x'] * 9)}]" for last, name in zip(["", *names], names)
    ]
    (folder / "b" / "config.yaml").write_text("\n".join([*lines, "algo:\n  sampling:\n    source: x\n"]))
    began = time.monotonic()
    assert set(listed(folder)) == {"a", "b"} and time.monotonic() - began < 10


def test_a_run_that_went_on_and_a_fork_say_so(folder):
    lines = [
        {"step": 2, "checkpoint": f"{folder}/a/checkpoints/step_000002", "at": "2026-11-02T10:30:59+00:00"},
        {"step": 3, "checkpoint": "step_000003", "at": "2026-11-03T09:00:00+00:00"},
    ]
    (folder / "b" / "resumes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "ch')
    assert listed(folder)["b"].remarks == ["forked from a, step 2", "resumed after step 3"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "config.yaml", "resumes.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\xff\n{", b"[]\n[]\n", b"null\n"])
def test_damaged_files_leave_the_run_in_the_list(folder, name, content):
    (folder / "b" / name).write_bytes(content)
    assert set(listed(folder)) == {"a", "b"}


def test_only_what_has_changed_is_read_again(folder, append, monkeypatch):
    before, read = listed(folder), []
    whole = listing.result_of
    monkeypatch.setattr(listing, "result_of", lambda path, problems: read.append(path.name) or whole(path, problems))
    assert listed(folder) == before and not read
    append(folder / "b", {"step": 4})
    assert listed(folder)["b"].step == 4 and read == ["b"]
