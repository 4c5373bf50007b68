"""Filters: what they match, what they drop, and what they leave alone."""

from types import SimpleNamespace

import pytest

from prl.config.errors import ConfigError
from prl.orchestrator.filters import FilterSlot
from prl.orchestrator.filters.base import Filter
from prl.orchestrator.filters.zero_advantage import ZeroAdvantage, ZeroAdvantageConfig


class Everything(Filter):
    """Matches any rollout."""

    def matches(self, rollout):
        return True


@pytest.fixture
def zero():
    return ZeroAdvantage(ZeroAdvantageConfig())


def slot(**nodes):
    return FilterSlot(nodes, "filters.post_batch")


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


def test_the_first_filter_that_matches_is_the_one_recorded(make_rollout, monkeypatch):
    monkeypatch.setattr("prl.orchestrator.filters.base.Everything", Everything, raising=False)
    everything = SimpleNamespace(_target_="prl.orchestrator.filters.base.Everything", enforce=False)
    rollout = make_rollout(advantages=0.0)
    slot(first=everything, second=ZeroAdvantageConfig()).apply([rollout])
    assert (rollout.filtered_by, rollout.dropped) == ("first", False)


def test_errored_rollouts_are_not_filtered(make_rollout):
    rollout = make_rollout(advantages=0.0, error="ValueError: no")
    slot(zero_advantage=ZeroAdvantageConfig()).apply([rollout])
    assert rollout.filtered_by is None and not rollout.dropped


def test_a_target_that_is_no_filter_is_refused_with_its_key():
    with pytest.raises(ConfigError, match=r"filters\.post_batch\.mine\._target_='prl\.orchestrator\.sink\.Sink'.*Filter"):
        slot(mine=SimpleNamespace(_target_="prl.orchestrator.sink.Sink", enforce=True))
