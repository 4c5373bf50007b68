"""Filter slots: what is matched, what is dropped, and what is left alone."""

from dataclasses import dataclass

import pytest

from prl.errors import PrlError
from prl.orchestrator.filters.base import Filter, apply_filters
from prl.rollouts.rollout import Outcome, Stage


@dataclass(kw_only=True)
class Everything(Filter):
    """Matches any rollout."""

    def matches(self, rollout):
        return True


@dataclass(kw_only=True)
class Broken(Filter):
    def matches(self, rollout):
        raise ZeroDivisionError("a bug of the filter")


def test_enforce_drops_and_leaves_reward_and_tokens_alone(make_rollout, zero):
    flat, useful = make_rollout(1.0, advantages=0.0), make_rollout(1.0, advantages=0.5)
    apply_filters({"post_batch": {"zero_advantage": zero()}}, "post_batch", [flat, useful])
    assert flat.outcome == Outcome(Stage.POST_FILTERED, "filter zero_advantage", "zero_advantage")
    assert flat.matched == {"post_batch": "zero_advantage"}
    assert useful.is_active and useful.matched == {}
    assert flat.reward == 1.0 and flat.samples[0].token_ids == [0, 1, 2, 3]


def test_without_enforce_a_match_is_recorded_and_kept(make_rollout, zero):
    rollout = make_rollout(advantages=0.0)
    apply_filters({"post_batch": {"zero_advantage": zero(enforce=False)}}, "post_batch", [rollout])
    assert rollout.matched == {"post_batch": "zero_advantage"} and rollout.is_active


def test_the_first_filter_that_matches_is_the_one_recorded(make_rollout, zero):
    rollout = make_rollout(advantages=0.0)
    apply_filters({"post_batch": {"first": Everything(), "second": zero()}}, "post_batch", [rollout])
    assert rollout.matched == {"post_batch": "first"} and rollout.is_active


@pytest.mark.parametrize("stage", Stage)
def test_rollouts_that_have_left_are_not_asked(make_rollout, stage):
    rollout = make_rollout(advantages=0.0)
    rollout.leave(stage, "before")
    apply_filters({"pre_batch": {"all": Everything(enforce=True), "broken": Broken()}}, "pre_batch", [rollout])
    assert rollout.outcome == Outcome(stage, "before") and rollout.matched == {}


def test_a_filter_that_fails_is_named(make_rollout):
    with pytest.raises(PrlError, match=r"^filters\.post_batch\.mine: Broken\.matches failed: ZeroDivisionError: a bug"):
        apply_filters({"post_batch": {"mine": Broken()}}, "post_batch", [make_rollout()])


@pytest.mark.parametrize(
    ("pre", "post", "matched", "stage"),
    [
        (False, False, {"pre_batch": "all", "post_batch": "all"}, None),
        (False, True, {"pre_batch": "all", "post_batch": "all"}, Stage.POST_FILTERED),
        (True, True, {"pre_batch": "all"}, Stage.PRE_FILTERED),  # the second slot is not asked about what has left
    ],
)
def test_each_slot_has_a_record_of_its_own(make_rollout, pre, post, matched, stage):
    rollout = make_rollout(1.0)
    filters = {"pre_batch": {"all": Everything(enforce=pre)}, "post_batch": {"all": Everything(enforce=post)}}
    apply_filters(filters, "pre_batch", [rollout])
    assert rollout.is_active is not pre
    apply_filters(filters, "post_batch", [rollout])
    assert rollout.matched == matched and rollout.reward == 1.0
    assert (rollout.outcome and rollout.outcome.stage) == stage


def test_empty_slots_find_nothing(make_rollout):
    rollout, filters = make_rollout(advantages=0.0), {}
    apply_filters(filters, "pre_batch", [rollout])
    apply_filters(filters, "post_batch", [rollout])
    assert rollout.is_active and rollout.matched == {}
