"""Filters: what they match, what they drop, and what they leave alone."""

from types import SimpleNamespace

import pytest

from prl.errors import ConfigError, PrlError
from prl.orchestrator.filters import Filters, FiltersConfig, FilterSlot
from prl.orchestrator.filters.base import Filter
from prl.orchestrator.filters.zero_advantage import ZeroAdvantage, ZeroAdvantageConfig


class Everything(Filter):
    """Matches any rollout."""

    def matches(self, rollout):
        return True


class Broken(Filter):
    def matches(self, rollout):
        raise ZeroDivisionError("a bug of the filter")


@pytest.fixture
def zero():
    return ZeroAdvantage(ZeroAdvantageConfig(), vocab_size=64)


@pytest.fixture
def node(monkeypatch):
    """The config of a filter of this module."""

    def make(cls, enforce):
        monkeypatch.setattr(f"prl.orchestrator.filters.base.{cls.__name__}", cls, raising=False)
        return SimpleNamespace(_target_=f"prl.orchestrator.filters.base.{cls.__name__}", enforce=enforce)

    return make


def slot(**nodes):
    return FilterSlot(nodes, "filters.post_batch", "filtered_by", vocab_size=64)


def test_all_zero_advantages_match(zero, make_rollout):
    assert zero.matches(make_rollout(advantages=0.0))
    assert not zero.matches(make_rollout(advantages=-1e-9))
    assert not zero.matches(make_rollout(lengths=(3, 3), advantages=[0.0] * 5 + [0.1]))


def test_no_advantages_at_all_never_match(zero, make_rollout):
    assert not zero.matches(make_rollout())


@pytest.mark.parametrize("stream", ["ce_weights", "ref_kl_weights"])
def test_weight_on_another_component_keeps_the_rollout(zero, make_rollout, stream):
    rollout = make_rollout(advantages=0.0, lengths=(4, 4))
    setattr(rollout.samples[1], stream, [0.0, 0.1, 0.0, 0.0])
    assert not zero.matches(rollout)
    setattr(rollout.samples[1], stream, [0.0] * 4)
    assert zero.matches(rollout)


def test_enforce_drops_and_leaves_reward_and_tokens_alone(make_rollout):
    flat, useful = make_rollout(1.0, advantages=0.0), make_rollout(1.0, advantages=0.5)
    slot(zero_advantage=ZeroAdvantageConfig()).apply([flat, useful])
    assert (flat.filtered_by, flat.dropped) == ("zero_advantage", True)
    assert (useful.filtered_by, useful.dropped) == (None, False)
    assert flat.reward == 1.0 and flat.samples[0].token_ids == [0, 1, 2, 3]


def test_without_enforce_a_match_is_recorded_and_kept(make_rollout):
    rollout = make_rollout(advantages=0.0)
    slot(zero_advantage=ZeroAdvantageConfig(enforce=False)).apply([rollout])
    assert (rollout.filtered_by, rollout.dropped) == ("zero_advantage", False)


def test_the_first_filter_that_matches_is_the_one_recorded(make_rollout, node):
    rollout = make_rollout(advantages=0.0)
    slot(first=node(Everything, False), second=ZeroAdvantageConfig()).apply([rollout])
    assert (rollout.filtered_by, rollout.dropped) == ("first", False)


def test_errored_rollouts_are_not_filtered(make_rollout):
    rollout = make_rollout(advantages=0.0, error="ValueError: no")
    slot(zero_advantage=ZeroAdvantageConfig()).apply([rollout])
    assert rollout.filtered_by is None and not rollout.dropped


def test_a_target_that_is_no_filter_is_refused_with_its_key():
    with pytest.raises(
        ConfigError, match=r"filters\.post_batch\.mine\._target_='prl\.orchestrator\.batcher\.Batcher'.*Filter"
    ):
        slot(mine=SimpleNamespace(_target_="prl.orchestrator.batcher.Batcher", enforce=True))


def test_a_filter_that_fails_is_named(make_rollout, node):
    with pytest.raises(PrlError, match=r"^filters\.post_batch\.mine: ZeroDivisionError: a bug of the filter"):
        slot(mine=node(Broken, False)).apply([make_rollout()])


# --- two slots --------------------------------------------------------------------------------------------------------


def both(pre, post):
    return Filters(FiltersConfig(pre_batch=pre, post_batch=post), vocab_size=64)


def test_a_filter_knows_the_size_of_the_vocabulary(node):
    filters = both({"a": node(Everything, False)}, {"b": ZeroAdvantageConfig()})
    assert filters.pre_batch.filters["a"].vocab_size == filters.post_batch.filters["b"].vocab_size == 64


@pytest.mark.parametrize(
    ("pre", "post", "recorded", "dropped_by", "in_batch"),
    [
        (False, False, ("all", "all"), None, True),
        (False, True, ("all", "all"), "all", True),
        (True, True, ("all", None), "all", False),  # the second slot is not asked about what is gone
    ],
)
def test_each_slot_has_a_record_of_its_own(make_rollout, node, pre, post, recorded, dropped_by, in_batch):
    rollout = make_rollout(1.0)
    filters = both({"all": node(Everything, pre)}, {"all": node(Everything, post)})
    filters.pre_batch.apply([rollout])
    assert rollout.in_batch is not pre
    filters.post_batch.apply([rollout])
    assert (rollout.pre_filtered_by, rollout.filtered_by) == recorded
    assert rollout.dropped_by == dropped_by and rollout.dropped is (dropped_by is not None)
    assert rollout.in_batch is in_batch and rollout.reward == 1.0


def test_the_name_is_that_of_the_filter_that_dropped_it(make_rollout, node):
    rollout = make_rollout(advantages=0.0)
    filters = both({"watch": node(Everything, False)}, {"zero": ZeroAdvantageConfig()})
    filters.pre_batch.apply([rollout])
    assert rollout.dropped_by is None
    filters.post_batch.apply([rollout])
    assert rollout.dropped_by == "zero"


def test_empty_slots_find_nothing(make_rollout):
    rollout = make_rollout(advantages=0.0)
    filters = both({}, {})
    for each in (filters.pre_batch, filters.post_batch):
        each.apply([rollout])
    assert rollout.in_batch and not rollout.dropped and rollout.pre_filtered_by is rollout.filtered_by is None
