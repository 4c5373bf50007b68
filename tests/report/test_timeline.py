"""The picture of a run and the command that draws it, on made-up runs."""

import json
import re
import shutil

import pytest
from made_run import make_run

from prl import timeline
from prl.errors import ConfigError
from prl.report.runs import read_run
from prl.report.timeline import KIND_OF, KINDS, data, kind_of, over, parsed, write_timeline
from prl.text import CONTROL
from prl.wire import events
from prl.wire.events import Span

EVIL = "\x1b]0;x\x07\u202e</script><script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "outputs" / "first", steps=30, rollouts=2)


def data_of(path):
    text = path.read_text("utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_command_draws_and_prints_the_shares(run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    assert timeline.main(["first"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out.splitlines()[-1] == "outputs/first/timeline.html"
    # of 1.5 s: the engine for 1.2, the trainer for 0.45, the orchestrator for 0.1
    assert "engine 80 % busy (7 % loading weights), trainer 30 %: generation-bound" in said.out
    lines = " ".join(said.out.split())
    assert "engine 80 % generating 73 %, loading weights 7 % the trainer 20 %" in lines
    assert "trainer 30 % forward and backward 23 %, exporting weights 7 %" in lines
    assert "shares of the 45 s from the first batch to the last update; the start is left out" in lines
    assert timeline.main(["first", "--steps", "10-19"]) == 0
    said = capsys.readouterr().out
    assert "shares of the 15 s of steps 10 to 19" in said
    drawn = data_of(run / "timeline.html")
    assert {span[4] for span in drawn["spans"]} == set(range(10, 20)) and len(drawn["spans"]) == 70


@pytest.mark.parametrize("steps", ["0-3", "5-4", "a", "1-2-3", "-3", ""])
def test_steps_that_are_none_are_refused(steps, run, capsys):
    with pytest.raises(ConfigError, match="expected two steps, 10-20, or one"):
        parsed(steps)
    assert timeline.main([str(run), f"--steps={steps}"]) == 2 and not (run / "timeline.html").exists()


def test_a_single_step_and_no_steps():
    assert (parsed("7"), parsed("3-3"), parsed(None)) == ((7, 7), (3, 3), None)
    assert over(None, None) == ""


@pytest.mark.parametrize(
    ("spoil", "arguments", "said"),
    [
        (lambda run: shutil.rmtree(run / "events"), [], "has no events: it has not begun, or was made by a prl that"),
        (lambda run: None, ["--steps", "31-40"], "has no events of step 31 to 40: it has made 30"),
        (shutil.rmtree, [], "is not a run directory: it does not exist"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(run, capsys, spoil, arguments, said):
    spoil(run)
    assert timeline.main([str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("error: ")


def test_a_run_without_a_step_is_drawn_without_shares(run, capsys):
    (run / "events" / "trainer.jsonl").unlink()
    assert timeline.main([str(run)]) == 0
    assert "No step was made." in (run / "timeline.html").read_text()
    assert capsys.readouterr().out == f"{run}/timeline.html\n"


def test_what_is_damaged_is_said_and_the_rest_is_drawn(run, capsys):
    path = run / "events" / "trainer.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert timeline.main([str(run)]) == 0
    said = capsys.readouterr()
    assert said.err == f"warning: {path}: 1 of 90 lines cannot be read\n" and "engine" in said.out
    assert "1 of 90 lines cannot be read" in (run / "timeline.html").read_text()


def test_a_long_time_without_anything_is_cut_short():
    made = [Span("trainer", "optimiser", at, at + 1, step) for step, at in enumerate([50.0, 51.0, 60.0, 90061.0], 1)]
    drawn = data(made)
    assert [span[2:4] for span in drawn["spans"]] == [[0, 1], [1, 2], [10, 11], [14, 15]]
    assert drawn["gaps"] == [(12.5, "25 h 0 min")]
    assert drawn["steps"] == [(1, 1), (2, 2), (3, 11), (4, 15)]


def test_every_name_has_a_colour_of_one_meaning():
    assert len({colour for colour, _ in KINDS.values()}) == len(KINDS)
    names = {value for name, value in vars(events).items() if name.isupper() and isinstance(value, str)}
    names -= {events.FOLDER, events.WAITING, events.ORCHESTRATOR, events.ENGINE, events.TRAINER, events.EVALUATION}
    assert {name for name in names if kind_of(name) == "other"} == set()
    assert set(KIND_OF) <= names | set(events.OWN_WORK)


def test_a_picture_of_too_many_keeps_the_last(run, monkeypatch):
    monkeypatch.setattr("prl.report.timeline.MOST", 50)
    path, found = write_timeline(read_run(run))
    drawn = data_of(path)
    assert len(drawn["spans"]) == 50 and max(span[4] for span in drawn["spans"]) == 30
    assert found.seconds == pytest.approx(45.0) and "161 earlier entries are left out" in path.read_text()


def test_nothing_in_its_events_runs_or_escapes(run, capsys):
    for path in (run / "events").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        at = {"start": 1_700_000_011.0, "stop": 1_700_000_012.0, "step": 1}
        more = [at | {"process": text, "what": text} for text in (EVIL, "", " ", "engine")]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines + more))
    (run / "events" / "evil.jsonl").write_text(EVIL)
    renamed = run.rename(run.with_name("<b>x"))
    assert timeline.main([str(renamed)]) == 0
    said, page = capsys.readouterr(), (renamed / "timeline.html").read_text()
    for text in (said.out, said.err, page):
        assert not CONTROL.search(text)
    assert "<script>alert" not in page and "<img src=x" not in page and "<b>x" not in page
    assert r"\x1b]0;x\x07" in said.out
