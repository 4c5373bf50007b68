"""The verdict's sentences on made-up metrics, on either side of each threshold."""

from pathlib import Path

import pandas as pd
import pytest

from prl.runs.result import RunResult
from prl.tools.report.runs import Run
from prl.tools.report.shares import Shares
from prl.tools.report.verdict import verdict


def run_of(columns=None, steps=20, status="completed", **result):
    """A run with metrics of steps 1 to `steps`; a column is a value for all of them, or a list."""
    metrics = pd.DataFrame(columns or {}, index=pd.RangeIndex(1, steps + 1, name="step"), dtype=float)
    ended = RunResult(status=status, **{"steps": steps, **result})
    return Run(dir=Path("/a"), config={"max_steps": 20}, overrides=[], result=ended, metrics=metrics, problems=[])


def said(columns=None, **kwargs):
    return [finding.text for finding in verdict(run_of(columns, **kwargs))[1:]]


DID = {
    "engine": {"generating": 0.744, "loading weights": 0.18},
    "trainer": {"forward and backward": 0.306, "waiting for a batch": 0.694},
}


def test_a_headline_has_reward_bound_and_signal():
    columns = {"reward/all/mean": [0.32] * 5 + [0.6] * 10 + [0.88] * 5, "rollouts/batch": 100}
    found = verdict(run_of(columns | {"rollouts/trained": [90] * 15 + [34] * 5}), Shares(60.0, DID, "generation-bound"))
    assert found[0].text == (
        "Sampled reward 0.32 to 0.88; generation-bound; 66 % of each of the last batches had no signal."
    )
    assert found[3].text.startswith("Engine 92 % busy (18 % loading weights), trainer 31 %: generation-bound")


@pytest.mark.parametrize(
    ("status", "result", "text", "mood"),
    [
        ("completed", {"seconds": 90.0}, "Completed 20 steps in 90 s.", "good"),
        ("completed", {"steps": 7, "ended_because": "no tasks"}, "Completed 7 steps in 0 s, of 20: no tasks.", "warn"),
        ("failed", {"steps": 3, "error": "Traceback\n \nKeyError: 1"}, "Failed at step 3 of 20: KeyError: 1", "bad"),
        ("running", {"steps": 4}, "Still running, at step 4 of 20.", "plain"),
        ("stopped", {"steps": 4, "error": "interrupted"}, "Stopped at step 4 of 20: interrupted.", "warn"),
        ("crashed", {"steps": 4}, "Crashed at step 4 of 20: its process is gone and has left no result", "bad"),
    ],
)  # fmt: skip
def test_how_it_ended_comes_first(status, result, text, mood):
    found = verdict(run_of({"reward/all/mean": 1.0}, status=status, **result))
    reward = "Sampled reward 1.00 to 1.00."
    if mood == "good":
        assert (found[0].text, found[1].text, found[1].mood) == (reward, text, mood)
    else:
        assert (found[0].text, found[0].mood, found[1].text) == (text, mood, reward)


WARNINGS = [
    ({"truncated/all": [0.0] * 15 + [0.1] * 5}, "A length limit cut off 10 % of the last rollouts.", True),
    ({"truncated/all": [0.9] * 15 + [0.09] * 5}, "cut off", False),
    ({"off_policy/dropped": 5, "rollouts/arrived": 100}, "100 rollouts were dropped as too old, 5 % of", True),
    ({"off_policy/dropped": 4.9, "rollouts/arrived": 100}, "too old", False),
    ({"rollouts/errored": 1, "rollouts/arrived": 100}, "20 rollouts failed, 1 % of those finished.", True),
    ({"rollouts/errored": 0.9, "rollouts/arrived": 100}, "failed", False),
    ({"rollouts/batch": 10, "rollouts/trained": 5}, "last batches had no signal: a filter dropped them", True),
    ({"rollouts/batch": 10, "rollouts/trained": 5.1}, "no signal", False),
    ({"rollouts/batch": 10, "rollouts/trained": [10] * 18 + [0] * 2}, "no signal", False),
    ({"lr": 1, "reward/all/mean": [0.5] * 13 + [None] * 7}, "The last 7 steps have no finite reward.", True),
    ({"lr": 1, "reward/all/mean": [None] * 13 + [0.5] * 7}, "no finite reward", False),
    ({"eval/x/avg@1": 0.5, "reward/all/mean": [0.5] * 13 + [None] * 7}, "no finite reward", False),
    ({"reward/math/mean": [0.1] * 5 + [0.9] * 5 + [0.85] * 10}, "math: sampled reward 0.10 to 0.85.", True),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "text", "there"), WARNINGS)
def test_warnings(columns, text, there):
    assert any(text in sentence for sentence in said(columns)) == there, said(columns)


def test_evaluations_go_from_the_first_to_the_last_and_name_the_best():
    columns = {"eval/math/avg@4": [None, 0.25, 0.8, *[None] * 16, 0.75], "eval/x/avg@1": [0.5] + [None] * 19}
    assert said(columns)[1:] == [
        "math: held-out reward (avg@4) 0.25 to 0.75 at step 20, the best 0.80 at 3.",
        "x: held-out reward (avg@1) 0.50 at step 1.",
    ]
