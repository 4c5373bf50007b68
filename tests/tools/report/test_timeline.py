"""Shares of the time from spans made by hand, the trace of a made-up run, and the command that writes it."""

import json

import pytest
from made_run import make_run

from prl.tools.report.__main__ import main as report
from prl.tools.report.shares import read_spans, shares
from prl.transport.events import Span


def spans(process, *made):
    return [Span(process, what, start, stop, step) for what, start, stop, step in made]


START = spans("orchestrator", ("preparing", 0, 50, 0), ("waiting for engine and trainer", 50, 90, 0))
START += spans("trainer", ("loading the model", 60, 80, 0)) + spans("engine", ("generating", 90, 100, 1))
ORCHESTRATOR = [
    ("waiting for the first evaluation", 90, 100, 0),
    ("waiting for rollouts", 100, 104, 1),
    ("packing", 104, 104.5, 1),
    ("waiting for rollouts", 104.5, 108.5, 2),
    ("waiting for the trainer", 108.5, 110, 3),
    ("waiting for the last checkpoint", 110, 120, 3),
]
ENGINE = [("generating", 100, 106, 1), ("loading weights", 106, 106.5, 1), ("generating", 106.5, 109.5, 2)]
TRAINER = [
    ("waiting for a batch", 80, 104.5, 1),
    ("forward and backward", 104.5, 105.5, 1),
    ("optimiser", 105.5, 105.75, 1),
    ("exporting weights", 105.75, 106, 1),
    ("waiting for a batch", 106, 108.5, 2),
    ("forward and backward", 108.5, 109.5, 2),
    ("exporting weights", 109.5, 110, 2),
    ("checkpoint", 110, 119, 2),
]
ASYNCHRONOUS = START + spans("evaluation", ("evaluating", 90, 100, 0)) + spans("orchestrator", *ORCHESTRATOR)
ASYNCHRONOUS += spans("engine", *ENGINE) + spans("trainer", *TRAINER)
"""Two steps in ten seconds, 100 to 110, after 100 of start: the engine generates for 9, the trainer works for 3."""


def one_step(**seconds):
    """A step of ten seconds in which each process works for so long, from the start of the step on."""
    made = spans("orchestrator", ("preparing", 0, 1, 0), ("waiting for rollouts", 10, 20, 1))
    made += spans("orchestrator", ("packing", 10, 10 + seconds.get("packing", 0), 1))
    made += spans("engine", ("generating", 10, 10 + seconds.get("generating", 0), 1))
    made += spans("engine", ("loading weights", 10, 10 + seconds.get("loading", 0), 1))
    made += spans("evaluation", ("evaluating", 10, 10 + seconds.get("evaluating", 0), 1))
    return made + spans("trainer", ("forward and backward", 20 - seconds.get("training", 0.1), 20, 1))


def test_shares_are_of_the_steps_alone():
    found = shares(ASYNCHRONOUS)
    assert found.seconds == pytest.approx(10.0), "neither the start nor the last checkpoint"
    assert found.sentence == "engine 95 % busy (5 % loading weights), trainer 30 %: generation-bound"
    assert list(found.did) == ["orchestrator", "engine", "trainer"]
    assert found.did["engine"] == pytest.approx({"generating": 0.9, "loading weights": 0.05})
    work = {what: share for what, share in found.did["trainer"].items() if share and not what.startswith("waiting")}
    assert work == pytest.approx({"forward and backward": 0.2, "exporting weights": 0.075, "optimiser": 0.025})
    assert found.busy("orchestrator") == pytest.approx(0.05)


def test_what_was_before_a_run_went_on_is_left_out():
    later = [
        Span(span.process, span.what, span.start + 500, span.stop + 500, span.step) for span in one_step(generating=8)
    ]
    assert shares([*ASYNCHRONOUS, *later]) == shares(later)


@pytest.mark.parametrize(
    ("seconds", "bound"),
    [
        ({"generating": 8}, "generation-bound"),
        ({"generating": 2, "training": 8}, "update-bound"),
        ({"generating": 5, "training": 4.5}, "generation and update balanced"),
        ({"loading": 6, "generating": 2}, "bound by loading weights"),
        ({"evaluating": 8, "generating": 8}, "bound by the evaluation"),
        ({"packing": 9}, "bound by the orchestrator"),
        ({"generating": 1}, "bound by tools, graders and frozen models"),
    ],
)
def test_what_takes_most_bounds_the_run(seconds, bound):
    assert shares(one_step(**seconds)).bound == bound


def test_without_a_step_there_are_no_shares(tmp_path, write_run, capsys):
    run = write_run(tmp_path / "a")
    assert report([str(run)]) == 0 and capsys.readouterr().out == f"{run}/report.html\n"
    assert not (run / "trace.json").exists()
    assert shares([]) is None and shares(START) is None


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "outputs" / "first", steps=30, rollouts=2)


def test_the_command_prints_shares_and_writes_a_trace(run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    assert report(["first"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    # of 1.5 s a step: the engine for 1.2, the trainer for 0.45
    assert "engine 80 % busy (7 % loading weights), trainer 30 %: generation-bound" in printed.out
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    drawn = [event for event in events if event["ph"] == "X"]
    recorded = read_spans(run, [])
    assert set(names.values()) == {span.process for span in recorded} and len(drawn) == len(recorded)
    forward = next(event for event in drawn if event["name"] == "forward and backward")
    assert names[forward["tid"]] == "trainer" and forward["args"] == {"step": 1} and forward["dur"] > 0
    assert min(event["ts"] for event in drawn) == 0
