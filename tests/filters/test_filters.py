"""Filters: what zero_advantage matches, what a slot drops, and what both leave alone."""

from dataclasses import dataclass

import pytest

from prl.filters.base import Filter, apply_filters
from prl.filters.zero_advantage import ZeroAdvantage
from prl.rollouts.rollout import Outcome, Stage


@dataclass(kw_only=True)
class Everything(Filter):
    """Matches any rollout."""

    def matches(self, rollout):
        return True


class Broken(Filter):
    def matches(self, rollout):
        raise ZeroDivisionError("a bug of the filter")


def apply(rollouts, **filters):
    apply_filters({"post_batch": filters}, "post_batch", rollouts)


def dropped(stage, name):
    return Outcome(stage, f"filter {name}", name)


def test_all_zero_advantages_match(make_rollout):
    zero = ZeroAdvantage()
    assert zero.enforce is True
    assert zero.matches(make_rollout(advantages=0.0))
    assert not zero.matches(make_rollout(advantages=-1e-9))
    assert not zero.matches(make_rollout()), "of an algorithm that assigns none"
    assert not zero.matches(make_rollout(lengths=(3, 3), advantages=[0.0] * 5 + [0.1]))


@pytest.mark.parametrize(
    ("reward", "advantage", "matches"),
    [
        (0.3, 5.6e-17, True),  # 0.1 + 0.2 - 0.3, of an algorithm with a mean of its own
        (0.0, 5.6e-17, True),
        (1e6, 1.2e-10, True),
        (1e-9, 5e-10, False),
        (1e6, 0.5, False),
    ],
)
def test_an_advantage_within_rounding_of_the_reward_is_zero(make_rollout, reward, advantage, matches):
    assert ZeroAdvantage().matches(make_rollout(reward, advantages=advantage)) is matches


@pytest.mark.parametrize("stream", ["ce_weights", "ref_kl_weights"])
def test_weight_on_another_component_keeps_the_rollout(make_rollout, stream):
    rollout = make_rollout(advantages=0.0, lengths=(4, 4))
    setattr(rollout.samples[1], stream, [0.0, 0.1, 0.0, 0.0])
    assert not ZeroAdvantage().matches(rollout)
    setattr(rollout.samples[1], stream, [0.0] * 4)
    assert ZeroAdvantage().matches(rollout)
    rollout.samples[0].rl_weights = [1.0] * 4
    assert ZeroAdvantage().matches(rollout), "rl has nothing to weigh without an advantage"


def test_enforce_drops_and_leaves_reward_and_tokens_alone(make_rollout):
    flat, useful = make_rollout(1.0, advantages=0.0), make_rollout(1.0, advantages=0.5)
    apply([flat, useful], zero_advantage=ZeroAdvantage())
    assert flat.matched == {"post_batch": "zero_advantage"}
    assert flat.outcome == dropped(Stage.POST_FILTERED, "zero_advantage")
    assert useful.matched == {} and useful.is_active
    assert flat.reward == 1.0 and flat.samples[0].token_ids == [0, 1, 2, 3]


@pytest.mark.parametrize("stage", Stage)
def test_rollouts_that_have_left_are_not_asked(make_rollout, stage):
    rollout = make_rollout(advantages=0.0)
    rollout.leave(stage, "before")
    apply([rollout], all=Everything(enforce=True), broken=Broken())
    assert rollout.outcome == Outcome(stage, "before") and rollout.matched == {}


# --- two slots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "post", "matched", "outcome"),
    [
        (False, False, {"pre_batch": "all", "post_batch": "all"}, None),
        (False, True, {"pre_batch": "all", "post_batch": "all"}, dropped(Stage.POST_FILTERED, "all")),
        (True, True, {"pre_batch": "all"}, dropped(Stage.PRE_FILTERED, "all")),  # the second slot is not asked
    ],
)
def test_each_slot_has_a_record_of_its_own(make_rollout, pre, post, matched, outcome):
    rollout = make_rollout(1.0)
    filters = {"pre_batch": {"all": Everything(enforce=pre)}, "post_batch": {"all": Everything(enforce=post)}}
    apply_filters(filters, "pre_batch", [rollout])
    assert rollout.is_active is not pre
    apply_filters(filters, "post_batch", [rollout])
    assert (rollout.matched, rollout.outcome, rollout.reward) == (matched, outcome, 1.0)
