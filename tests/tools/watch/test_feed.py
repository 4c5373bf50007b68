"""What a page is told of files that grow, shrink, are replaced or go."""

import json
import os

import pytest

from prl.tools.watch import feed
from prl.tools.watch.feed import Feed, read_on


def news(page):
    """The events since the last call: [(name, data)], with metrics as plain data."""
    found = []
    for name, values in page.news():
        if name == "lines":
            values = values | {"metrics": {key: json.loads(bytes(raw)) for key, raw in values["metrics"].items()}}
        found.append((name, values))
    return found


def test_a_line_arrives_once_it_is_whole(folder, append):
    path = folder / "a" / "metrics.jsonl"
    place, found, anew = read_on(path, "")
    assert anew and found["entropy/all/mean"][0] == [1, 2, 3]
    append(folder / "a", '{"step": 4, "entropy/all/mean"', end="")
    assert read_on(path, place) == (place, {}, False)
    append(folder / "a", ': 0.5}\n{"step": 5, "entropy/all/mean": NaN}\n{"step": 6, "entropy/all/mean": null}')
    behind, found, anew = read_on(path, place)
    assert (found, anew) == ({"entropy/all/mean": ([4], [0.5])}, False)
    assert read_on(path, behind) == (behind, {}, False)


def test_of_long_runs_every_so_manieth_step_is_read_and_each_evaluation(folder):
    path = folder / "a" / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "entropy/all/mean": {step}.5}}\n' for step in range(1, 101)))
    with path.open("a") as file:
        file.write('{"step": 101, "eval/math/avg@1": 0.5}\n{"step": 102, "entropy/all/mean": 1}\n{"step": 103, "ent')
    at, found, _ = read_on(path, "", most=30)
    steps, values = found["entropy/all/mean"]
    assert steps == [*range(2, 100, 4), 102] and values[0] == 2.5, "a fourth of 102 lines, back from the last"
    assert found["eval/math/avg@1"] == ([101], [0.5])
    assert read_on(path, at, most=30) == (at, {}, False)


@pytest.mark.parametrize("way", ["replaced", "shortened", "removed"])
def test_another_file_is_told_anew(folder, way):
    path = folder / "a" / "metrics.jsonl"
    place, *_ = read_on(path, "")
    first = b"".join(path.read_bytes().splitlines(keepends=True)[:2])
    if way == "replaced":  # as a run does that goes on from a checkpoint, and has come further meanwhile
        (folder / "new").write_bytes(first + b'{"step": 2, "grad_norm": 1}\n' * 200)
        os.replace(folder / "new", path)
    elif way == "shortened":
        os.truncate(path, len(first))
    else:
        path.unlink()
    _, found, anew = read_on(path, place)
    assert anew and found.get("entropy/all/mean", ([], []))[0] == ([] if way == "removed" else [1])


@pytest.mark.parametrize("at", ["x", "-1-5", "1-", "1-2-3", "1-99999", "٣-٤"])
def test_a_place_that_is_none_is_the_beginning(folder, at):
    path = folder / "a" / "metrics.jsonl"
    assert read_on(path, at) == read_on(path, "")


def test_a_page_is_told_what_changed_and_no_more(folder, append, monkeypatch):
    monkeypatch.setattr(feed, "RARELY_S", 0.0)
    monkeypatch.setattr(feed, "SHARE", 1e9)
    page = Feed([folder], {"a": ""})
    first = dict(news(page))
    assert [entry.name for entry in first["runs"]] and first["lines"]["anew"]
    assert first["state"]["run"] == "a" and "Completed 3 steps" in first["state"]["parts"]["head"]
    assert "generating" in first["state"]["parts"]["waits"]
    assert news(page) == []
    append(folder / "b", {"step": 4, "grad_norm": 0.5})
    assert [name for name, _ in news(page)] == ["runs"], "its curves are not on the page"
    append(folder / "a", {"step": 4, "grad_norm": 0.5, "rollouts/batch": 7})
    told = dict(news(page))
    assert set(told) == {"runs", "lines", "state"}
    assert told["lines"]["metrics"] == {"grad_norm": [[4], [0.5]]} and not told["lines"]["anew"]


def test_what_takes_long_is_read_rarely_but_a_new_status_is_shown_at_once(folder, append, monkeypatch):
    now, worked = [100.0], [0.0]
    monkeypatch.setattr(feed.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(feed.time, "thread_time", lambda: worked[0])

    def slow(run_dir):
        worked[0] += 0.15
        return {}

    monkeypatch.setattr(feed, "state_of", slow)
    page = Feed([folder], {"a": ""})
    told = []
    for second in range(1, 61):
        now[0] = 100.0 + second
        append(folder / "a", {"step": 3 + second})
        if second == 57:
            (folder / "a" / "result.json").write_text('{"status": "failed", "seconds": 1}')
        told += [second for name, _ in news(page) if name == "state"]
    assert told == [1, 51, 57], "0.15 s is 0.3 % of fifty"


def test_a_run_that_is_removed_takes_nothing_with_it(folder, monkeypatch):
    monkeypatch.setattr(feed, "RARELY_S", 0.0)
    monkeypatch.setattr(feed, "SHARE", 1e9)
    page = Feed([folder], {"a": "", "gone": ""})
    news(page)
    for path in sorted((folder / "a").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    told = dict(news(page))
    assert [entry.name for entry in told["runs"]] == ["b"]
