"""Shares of the time, from spans made by hand."""

import json
import os
import random
from itertools import pairwise

import pytest

from prl.report.overlap import both, lanes_of, overlap, read_spans, seconds, union, windows, without
from prl.wire.events import Span


def spans(process, *made):
    return [Span(process, what, start, stop, step) for what, start, stop, step in made]


START = spans("orchestrator", ("preparing", 0, 50, 0), ("waiting for engine and trainer", 50, 90, 0))
START += spans("trainer", ("loading the model", 60, 80, 0)) + spans("engine", ("generating", 90, 100, 1))


def asynchronous():
    """Two steps in ten seconds, 100 to 110, after 100 of start.

    The engine generates for 9 of them and loads weights for half a second; the trainer works for 3.
    """
    return [
        *START,
        *spans("evaluation", ("evaluating", 90, 100, 0)),
        *spans(
            "orchestrator",
            ("waiting for the first evaluation", 90, 100, 0),
            ("waiting for rollouts", 100, 104, 1),
            ("packing", 104, 104.5, 1),
            ("waiting for rollouts", 104.5, 108.5, 2),
            ("waiting for the trainer", 108.5, 110, 3),
            ("waiting for the last checkpoint", 110, 120, 3),
        ),
        *spans("engine", ("generating", 100, 106, 1), ("loading weights", 106, 106.5, 1)),
        *spans("engine", ("generating", 106.5, 109.5, 2)),
        *spans(
            "trainer",
            ("waiting for a batch", 80, 104.5, 1),
            ("forward and backward", 104.5, 105.5, 1),
            ("optimiser", 105.5, 105.75, 1),
            ("exporting weights", 105.75, 106, 1),
            ("waiting for a batch", 106, 108.5, 2),
            ("forward and backward", 108.5, 109.5, 2),
            ("exporting weights", 109.5, 110, 2),
            ("checkpoint", 110, 119, 2),
        ),
    ]  # fmt: skip


def test_the_shares_are_of_the_steps_alone():
    found = overlap(asynchronous())
    assert found.seconds == pytest.approx(10.0), "neither the start nor the last checkpoint"
    assert (found.engines, found.trainer) == (pytest.approx(0.95), pytest.approx(0.30))
    assert found.sentence == "engine 95 % busy (5 % loading weights), trainer 30 %: generation-bound"
    lanes = {lane.process: lane for lane in found.lanes}
    assert list(lanes) == ["orchestrator", "engine", "trainer"]
    assert lanes["engine"].did == pytest.approx({"generating": 0.9, "loading weights": 0.05})
    assert lanes["engine"].waited == pytest.approx({"the trainer": 0.05})
    assert lanes["trainer"].did == pytest.approx(
        {"forward and backward": 0.2, "exporting weights": 0.075, "optimiser": 0.025}
    )
    assert lanes["trainer"].waited == pytest.approx({"generation": 0.65, "loading weights": 0.05})
    assert lanes["orchestrator"].did == pytest.approx({"packing": 0.05})
    # generation comes first of what it may have waited for; then the weights; then the half second of the trainer alone
    assert lanes["orchestrator"].waited == pytest.approx(
        {"generation": 0.85, "loading weights": 0.05, "the trainer": 0.05}
    )


def test_some_steps():
    assert windows(asynchronous(), (2, 2)) == [(106, 110)]
    assert windows(asynchronous(), (1, 1)) == [(100, 106)], "what it waited before the run began is no part of it"
    assert windows(asynchronous(), (3, 9)) == [] and overlap(asynchronous(), (3, 9)) is None
    assert overlap(asynchronous(), (2, 2)).trainer == pytest.approx(1.5 / 4)


@pytest.mark.parametrize("kept", [[], START, [span for span in asynchronous() if span.process != "trainer"]])
def test_before_the_first_update_there_are_no_shares(kept):
    assert overlap(kept) is None


def test_a_run_that_was_killed_is_read_as_far_as_it_came():
    cut = [span for span in asynchronous() if span.stop <= 106]
    found = overlap(cut)
    assert found.seconds == pytest.approx(6.0) and found.trainer == pytest.approx(0.25) and found.engines == 1.0


def test_a_run_that_went_on_leaves_out_what_was_between():
    later = [
        *spans("orchestrator", ("preparing", 5000, 5040, 2), ("waiting for rollouts", 5050, 5060, 3)),
        *spans("engine", ("generating", 5050, 5055, 3)),
        *spans("trainer", ("loading the model", 5010, 5020, 2), ("forward and backward", 5055, 5060, 3)),
    ]
    assert windows(asynchronous() + later) == [(100, 110), (5050, 5060)]
    found = overlap(asynchronous() + later)
    assert found.seconds == pytest.approx(20.0)
    assert (found.engines, found.trainer) == (pytest.approx((9.5 + 5) / 20), pytest.approx((3 + 5) / 20))


def step_of(*lanes):
    """Ten seconds of one step."""
    made = spans("orchestrator", ("preparing", -5, 0, 0), ("waiting for rollouts", 0, 1e-6, 1))
    return made + [span for lane in lanes for span in lane] + spans("trainer", ("optimiser", 9.999999, 10, 1))


@pytest.mark.parametrize(
    ("lanes", "word"),
    [
        ([("engine", "generating", 0, 6), ("trainer", "forward and backward", 6, 10)], "generation-bound"),
        ([("engine", "generating", 0, 9), ("trainer", "optimiser", 2, 10)], "generation and update balanced"),
        ([("engine", "generating", 0, 5), ("trainer", "forward and backward", 1, 10)], "update-bound"),
        ([("engine", "generating", 0, 3), ("engine", "loading weights", 3, 8)], "bound by loading weights"),
        (
            [("evaluation", "evaluating", 0, 7), ("engine", "generating", 0, 9), ("trainer", "optimiser", 7, 9)],
            "bound by the evaluation",
        ),
        ([("engine", "generating", 0, 2), ("orchestrator", "packing", 2, 8)], "bound by the orchestrator"),
        ([("engine", "generating", 0, 2)], "bound by tools, graders and frozen models"),
        (
            [("engine 1", "generating", 0, 9), ("engine 2", "generating", 0, 1), ("trainer", "optimiser", 0, 8)],
            "update-bound",  # the engines are at work for half of the time, in the mean
        ),
    ],
)  # fmt: skip
def test_what_takes_most_of_the_time_has_its_name(lanes, word):
    made = [spans(process, (what, start, stop, 1)) for process, what, start, stop in lanes]
    assert overlap(step_of(*made)).bound == word


def test_lanes_have_one_order():
    names = ["trainer rank 1", "trainer", "x", "engine 2", "engine 1", "orchestrator", "evaluation", "teacher"]
    expected = ["orchestrator", "engine 1", "engine 2", "teacher", "evaluation", "trainer", "trainer rank 1", "x"]
    assert lanes_of([Span(name, "a", 0, 1, 1) for name in names]) == expected


def test_intervals_against_a_grid():
    """Union, cut and difference of random intervals, against sets of whole seconds."""
    draw = random.Random(0)

    def some():
        starts = [draw.randrange(50) for _ in range(draw.randrange(6))]
        return [(start, start + draw.randrange(8)) for start in starts]

    def grid(times):
        return {second for start, stop in times for second in range(start, stop)}

    for _ in range(300):
        one, other = some(), some()
        a, b = union(one), union(other)
        assert grid(a) == grid(one) and seconds(a) == len(grid(one))
        assert grid(both(a, b)) == grid(a) & grid(b) and seconds(both(a, b)) == len(grid(a) & grid(b))
        assert seconds(without(a, b)) == len(grid(a) - grid(b))
        assert all(first[1] < second[0] for first, second in pairwise(a)), "disjoint and in order"


def test_what_cannot_be_read_is_named_and_left_out(tmp_path):
    folder = tmp_path / "events"
    folder.mkdir()
    good = {"process": "trainer", "what": "optimiser", "start": 1.0, "stop": 2.0, "step": 5}
    bad = ['{"process": "trai', "[]", "{}", json.dumps(good | {"stop": 0.5}), json.dumps(good | {"step": "5"}), "\x00"]
    bad += [json.dumps(good).replace("2.0", "1e999"), json.dumps(good | {"start": None})]
    (folder / "trainer.jsonl").write_text("\n".join([json.dumps(good), *bad]))
    (folder / "orchestrator.jsonl").write_text("")
    (folder / "engine.jsonl").mkdir()
    os.mkfifo(folder / "fifo.jsonl")
    (folder / ".trainer.jsonl.12").write_text("x")
    problems = []
    assert read_spans(tmp_path, problems, steps=5) == [Span("trainer", "optimiser", 1.0, 2.0, 5)]
    assert problems == [
        f"{folder}/engine.jsonl cannot be read: Is a directory",
        f"{folder}/fifo.jsonl cannot be read: Not a regular file",
        f"{folder}/orchestrator.jsonl is empty",
        f"{folder}/trainer.jsonl: 8 of 9 lines cannot be read",
    ]
    (folder / "trainer.jsonl").write_text(json.dumps(good) + "\n")
    problems.clear()
    read_spans(tmp_path, problems, steps=7)
    assert problems[-1] == f"{folder}/trainer.jsonl: it ends with step 5, and the run made 7"
    assert read_spans(tmp_path / "nowhere", []) == []


def test_a_rank_that_the_run_went_on_without_is_no_problem(tmp_path):
    folder, problems = tmp_path / "events", []
    folder.mkdir()

    def record(name, *spans):
        lines = [{"process": name, "what": what, "start": at, "stop": at + 1, "step": step} for what, at, step in spans]
        (folder / f"{name.replace(' ', '_')}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    record("orchestrator", ("preparing", 0, 0), ("packing", 3, 6), ("preparing", 10, 6), ("packing", 15, 9))
    record("trainer", ("optimiser", 4, 6), ("optimiser", 16, 9))
    record("trainer rank 1", ("optimiser", 4, 6))
    read_spans(tmp_path, problems, steps=9)
    assert problems == []
    record("trainer rank 1", ("optimiser", 4, 6), ("optimiser", 14, 7))
    read_spans(tmp_path, problems, steps=9)
    assert problems == [f"{folder}/trainer_rank_1.jsonl: it ends with step 7, and the run made 9"]
