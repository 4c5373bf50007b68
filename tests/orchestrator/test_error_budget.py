"""Failed rollouts are counted by kind, and too many of them end the run."""

import pytest

from prl.episodes.tools import MalformedToolCall
from prl.errors import EngineError, PrlError
from prl.inference.sampler import OverlongPrompt
from prl.orchestrator.error_budget import LEAST, WINDOW, ErrorBudget
from prl.orchestrator.types import Group
from prl.rollouts.outcome import Stage
from prl.rollouts.rollout import ERROR_KINDS


@pytest.fixture
def make_group(make_rollout):
    def make(fine=0, failed=0, *, env="toy", error=None, kind=None, excused=False):
        rollouts = [make_rollout(env=env) for _ in range(fine + failed)]
        for rollout in rollouts[fine:]:
            rollout.fail(error or KeyError("x"), kind)
        return Group(0, env, 0, rollouts, excused=excused)

    return make


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("late"), "timeout"),
        (OverlongPrompt("long"), "overlong_prompt"),
        (MalformedToolCall("unclosed"), "tool_call"),
        (EngineError("gone", 503), "engine"),
        (KeyError("x"), "env"),
    ],
)
def test_an_exception_says_what_kind_it_is(make_rollout, error, kind):
    rollout = make_rollout()
    rollout.fail(error)
    rollout.fail(ValueError("the first one counts"))
    assert rollout.error_kind == kind and rollout.error.startswith(type(error).__name__)


def test_failures_are_counted_by_env_and_kind_since_the_last_time(make_group):
    failures = ErrorBudget(["a", "b"], 0.5)
    failures.add(make_group(1, 2, env="a"))
    failures.add(make_group(0, 1, env="b", error=TimeoutError("late")))
    failures.add(make_group(0, 1, env="b", error=EngineError("no", 400), kind="reference", excused=True))
    line = failures.take()
    assert {key for key, value in line.items() if value} == {
        "errors/all/env",
        "errors/a/env",
        "errors/all/timeout",
        "errors/b/timeout",
        "errors/all/reference",
        "errors/b/reference",
        "rollouts/errored",
    }
    assert (line["errors/all/env"], line["errors/b/timeout"], line["rollouts/errored"]) == (2.0, 1.0, 4.0)
    assert line["rollouts/errored"] == sum(value for key, value in line.items() if key.startswith("errors/all/"))
    assert set(failures.take().values()) == {0.0} and len(line) == 3 * len(ERROR_KINDS) + 1


def test_what_was_left_out_is_no_failure(make_group):
    group = make_group(3, 0)
    for rollout, stage in zip(group.rollouts, (Stage.STALE, Stage.SURPLUS, Stage.EMPTY), strict=True):
        rollout.leave(stage, "x")
    failures = ErrorBudget(["toy"], 0.0)
    failures.add(group)
    line = failures.take()
    assert set(line.values()) == {0.0} and "stale" not in ERROR_KINDS


def test_the_limit_itself_is_allowed_and_a_rollout_more_is_not(make_group):
    failures = ErrorBudget(["toy"], 0.25)
    failures.add(make_group(75, 25))
    failures.check(1)
    failures.add(make_group(0, 1, error=MalformedToolCall("unclosed block: {")))
    expected = r"step 7: 26 of the last 101 .* 'toy' .*max_error_share=0.25.*env: 25, tool_call: 1.*unclosed block: {"
    with pytest.raises(PrlError, match=expected):
        failures.check(7)


def test_few_rollouts_are_not_judged_and_old_ones_are_forgotten(make_group):
    failures = ErrorBudget(["toy"], 0.5)
    failures.add(make_group(0, LEAST - 1))
    failures.check(1)
    failures.add(make_group(LEAST, 0))
    failures.check(1)
    failures.add(make_group(WINDOW, 0))
    failures.add(make_group(0, WINDOW // 2))
    failures.check(1)
    failures.add(make_group(0, 1))
    with pytest.raises(PrlError, match=f"{WINDOW // 2 + 1} of the last {WINDOW}"):
        failures.check(1)


def test_an_env_is_judged_by_its_own_rollouts(make_group):
    failures = ErrorBudget(["good", "bad"], 0.5)
    failures.add(make_group(1000, 0, env="good"))
    failures.add(make_group(10, 60, env="bad"))
    with pytest.raises(PrlError, match="60 of the last 70 rollouts of env 'bad'"):
        failures.check(1)


def test_failures_while_a_model_was_away_are_not_held_against_the_env(make_group):
    failures = ErrorBudget(["toy"], 0.5)
    failures.add(make_group(3, 500, excused=True))
    failures.add(make_group(LEAST, 0))
    failures.check(1)


def test_the_first_failure_of_each_kind_is_told(make_group, caplog):
    failures = ErrorBudget(["toy"], 0.5)
    for _ in range(3):
        failures.add(make_group(1, 2, error=MalformedToolCall("unclosed block: {")))
    failures.add(make_group(0, 1, error=TimeoutError("late")))
    assert [record.getMessage().partition("(")[2] for record in caplog.records] == [
        "tool_call; the first of its kind): MalformedToolCall: unclosed block: {",
        "timeout; the first of its kind): TimeoutError: late",
    ]
