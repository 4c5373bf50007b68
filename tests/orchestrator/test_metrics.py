"""The numbers of a batch, by hand."""

import math
import random
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from prl.orchestrator.batcher import trains
from prl.orchestrator.filters.base import Filter
from prl.orchestrator.metrics import joined, mean, of_batch, of_filters, quantiles, why_untrained
from prl.rollouts.rollout import Stage
from prl.wire.messages import CallVersions
from prl.wire.metric_names import QUANTILES


class Never(Filter):
    def matches(self, rollout):
        return False


@pytest.fixture
def filters():
    """Those of `math` and, fewer, of `reverse`."""
    pre, post = ("gibberish", "repetition"), ("repetition", "zero_advantage")
    return {
        "math": {"pre_batch": {name: Never() for name in pre}, "post_batch": {name: Never() for name in post}},
        "reverse": {"post_batch": {"repetition": Never()}},
    }


def end(rollouts, stage=Stage.UNLEARNABLE):
    """Give an outcome to those that have none."""
    for rollout in rollouts:
        if rollout.is_active:
            rollout.leave(stage, "nothing of it within trainer.seq_len feeds a loss" * (stage is Stage.UNLEARNABLE))
    return rollouts


def drop(rollout, slot, name):
    rollout.matched[slot] = name
    rollout.leave(Stage.PRE_FILTERED if slot == "pre_batch" else Stage.POST_FILTERED, f"filter {name}", name)


def test_a_batch_of_two_envs(make_rollout):
    rollouts = [
        make_rollout(1.0, env="math", version=4),
        make_rollout(0.0, env="math", version=2),
        make_rollout(0.5, env="reverse", version=3),
        make_rollout(9.0, env="reverse", version=0, error="ValueError: no"),
    ]
    rollouts[0].trace.record_metric("correct", 1.0)
    rollouts[1].trace.metrics["correct"] = None  # seeded by verifiers, never set
    end(rollouts[:1], Stage.TRAINED)
    line = of_batch(end(rollouts), step=5)
    assert line["reward/all/mean"] == pytest.approx(0.5)
    assert line["reward/math/mean"] == line["reward/reverse/mean"] == 0.5
    assert line["metric/math/correct"] == 0.5
    assert line["off_policy/mean"] == pytest.approx((0 + 2 + 1) / 3) and line["off_policy/max"] == 2.0
    assert (line["rollouts/batch"], line["rollouts/trained"], line["rollouts/filtered"]) == (3.0, 1.0, 0.0)
    assert "rollouts/errored" not in line, "those of all that arrived are counted, in the batch or not"


def test_the_ages_of_tokens_by_hand(make_rollout):
    """In step 7: 2 tokens of version 3, 6 of 5 and 4 that began with 6; of a dropped rollout none."""
    turns, single, frozen, dropped = (make_rollout(version=version) for version in (3, 6, None, 0))
    turns.samples[0].versions = [CallVersions(1, 3, 3, 4), CallVersions(5, 11, 5, 5)]
    single.samples[0].versions = [CallVersions(2, 6, 6, 7)]
    dropped.samples[0].versions = [CallVersions(0, 4, 0, 0)]
    dropped.leave(Stage.PRE_FILTERED, "filter x", "x")
    line = of_batch(end([turns, single, frozen, dropped]), step=7)
    assert line["off_policy/token_mean"] == pytest.approx((2 * 3 + 6 * 1 + 4 * 0) / 12)
    assert line["off_policy/token_max"] == 3.0
    assert line["off_policy/token_updated"] == pytest.approx((2 + 4) / 12), "an update came while they were sampled"
    assert (line["off_policy/mean"], line["off_policy/max"]) == (1.5, 3.0), "of rollouts: from the first call"
    nothing = of_batch(end([make_rollout(version=None)]), step=7)
    assert nothing["off_policy/token_mean"] == nothing["off_policy/token_max"] == 0.0


def test_the_spread_of_each_number_by_hand(make_rollout):
    """Of five values 0, 1, 2, 3, 10 the deciles lie 0.4 of a step from the ends: 0.4 and 3 + 0.6 * 7."""
    rollouts = [make_rollout(reward, env="math", version=5 - int(reward)) for reward in (3.0, 0.0, 10.0, 1.0, 2.0)]
    for rollout in rollouts:
        rollout.assign_advantages(-rollout.reward)
    rollouts += [make_rollout(0.5, env="reverse", version=None), make_rollout(7.0, env="math", error="no")]
    line = of_batch(end(rollouts), step=6)
    spread = {"min": 0.0, "p10": 0.4, "p50": 2.0, "p90": 7.2, "max": 10.0}
    for name, value in spread.items():
        assert line[f"reward/math/{name}"] == line[f"off_policy/math/{name}"] == pytest.approx(value)
    assert line["advantage/math/p10"] == pytest.approx(-7.2) and line["advantage/math/max"] == 0.0
    assert line["reward/reverse/min"] == line["reward/reverse/max"] == 0.5
    assert "off_policy/reverse/p50" not in line, "a frozen model's rollouts have no age"
    assert "advantage/reverse/p50" not in line, "nor credit that nobody assigned"
    assert line["reward/all/p50"] == 1.5


def test_the_shares_that_each_slot_dropped_and_each_filter_matched(make_rollout, filters):
    math = [make_rollout(env="math") for _ in range(4)]
    reverse = [make_rollout(env="reverse") for _ in range(2)]
    failed, empty = make_rollout(env="math", error="ValueError: no"), make_rollout(env="math")
    empty.leave(Stage.EMPTY, "nothing was sampled")
    drop(math[0], "pre_batch", "gibberish")
    math[1].matched["pre_batch"] = "repetition"  # a monitor's: the second slot is asked too
    drop(math[1], "post_batch", "zero_advantage")
    math[2].matched["post_batch"] = "repetition"
    assert of_filters(end([*math, *reverse, failed, empty]), filters) == {
        "pre_filters/all/is_filtered": pytest.approx(1 / 6),
        "pre_filters/all/is_matched": pytest.approx(2 / 6),
        "pre_filters/all/gibberish": pytest.approx(1 / 6),
        "pre_filters/all/repetition": pytest.approx(1 / 6),
        "pre_filters/math/is_filtered": 0.25,
        "pre_filters/math/is_matched": 0.5,
        "pre_filters/math/gibberish": 0.25,
        "pre_filters/math/repetition": 0.25,
        "pre_filters/reverse/is_filtered": 0.0,
        "pre_filters/reverse/is_matched": 0.0,
        "filters/all/is_filtered": 0.2,
        "filters/all/is_matched": 0.4,
        "filters/all/repetition": 0.2,
        "filters/all/zero_advantage": 0.2,
        "filters/math/is_filtered": pytest.approx(1 / 3),
        "filters/math/is_matched": pytest.approx(2 / 3),
        "filters/math/repetition": pytest.approx(1 / 3),
        "filters/math/zero_advantage": pytest.approx(1 / 3),
        "filters/reverse/is_filtered": 0.0,
        "filters/reverse/is_matched": 0.0,
        "filters/reverse/repetition": 0.0,
    }


def test_what_a_filter_dropped_before_the_batch_counts_wherever_it_is_not_about_places(make_rollout):
    rollouts = [make_rollout(1.0, version=4), make_rollout(0.0, version=1)]
    drop(rollouts[1], "pre_batch", "repetition")
    line = of_batch(end(rollouts, Stage.TRAINED), step=5)
    assert line["reward/all/mean"] == line["reward/toy/mean"] == 0.5
    assert (line["rollouts/batch"], line["rollouts/trained"], line["rollouts/filtered"]) == (1.0, 1.0, 1.0)
    assert (line["off_policy/mean"], line["off_policy/max"]) == (0.0, 0.0)


def test_a_metric_that_only_some_rollouts_have_counts_as_zero_for_the_others(make_rollout):
    rollouts = [make_rollout(), make_rollout()]
    rollouts[1].trace.record_metric("used_a_tool", 1.0)
    assert of_batch(end(rollouts), step=1)["metric/toy/used_a_tool"] == 0.5


def test_a_batch_of_nothing_but_errors_has_finite_numbers(make_rollout):
    line = of_batch([make_rollout(error="x")], step=3)
    assert line["rollouts/batch"] == line["off_policy/max"] == line["reward/all/mean"] == 0.0
    assert all(map(math.isfinite, line.values()))


def test_mean_of_nothing_is_zero():
    assert mean([]) == 0.0 and mean(iter([1.0, 2.0])) == 1.5


@pytest.mark.parametrize("value", [0.95, 0.1, 1 / 3, 0.7])
def test_equal_values_have_exactly_their_own_mean(value):
    """A sum of ten 0.95 divided by ten is 0.9499999999999998: such a group would never reach a threshold of 0.95."""
    assert [n for n in (1, 2, 3, *range(12, 39)) if mean([value] * n) != value] == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 0, 0, 0, 0], 0.2),
        ([0, 1, 0, 0, 0], 0.2),
        ([True, True, True] + [False] * 7, 0.3),
        ([0.0] * 7 + [1.0] * 3, 0.3),
        ([-3.0, 5.0, 1.0, 1.0], 1.0),
        ([1e16, 1.0, -1e16, 1.0], 0.5),
        ([3e38, -3e38, 3e38], 1e38),
    ],
)
def test_a_mean_is_the_nearest_number_whatever_the_order(values, expected):
    """One of five right is worth 0.2, as somebody would write a threshold."""
    assert mean(values) == mean(values[::-1]) == expected and type(mean(values)) is float


def test_a_metric_is_the_mean_of_those_that_are_numbers(make_rollout):
    rollouts = [make_rollout() for _ in range(5)]
    for rollout, value in zip(rollouts, (1.0, math.nan, math.inf, -math.inf, 2.0), strict=True):
        rollout.trace.record_metric("depth", value)
    rollouts[1].trace.record_metric("lost", math.nan)
    line = of_batch(end(rollouts), step=1)
    assert line["metric/toy/depth"] == 1.5 and line["metric/toy/lost"] == 0.0
    line = of_batch(rollouts[1:2], step=1)
    assert line["metric/toy/lost"] == 0.0, "no number at all"


def test_what_an_enforced_filter_dropped_is_counted_whatever_its_slot(make_rollout):
    early, late, monitored, never = (make_rollout() for _ in range(4))
    drop(early, "pre_batch", "gibberish")
    drop(late, "post_batch", "zero_advantage")
    monitored.matched["post_batch"] = "repetition"
    monitored.leave(Stage.TRAINED)
    never.leave(Stage.EMPTY, "nothing was sampled")
    line = of_batch([early, late, monitored, never], step=1)
    assert (line["rollouts/batch"], line["rollouts/trained"], line["rollouts/filtered"]) == (2.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        ({}, True),
        ({"rl_weights": [0.0] * 4}, False),
        ({"rl_weights": [1.0, 0.0, 0.0, 0.0]}, False),  # its one weight lies off the mask
        ({"rl_weights": [0.0, 0.0, 0.0, 0.5]}, True),
        ({"rl_weights": [0.0] * 4, "ce_weights": [0.1, 0.0, 0.0, 0.0]}, True),
        ({"rl_weights": [0.0] * 4, "ref_kl_weights": [0.0, 1.0, 0.0, 0.0]}, True),
        ({"rl_weights": [0.0] * 4, "ce_weights": [0.0] * 4, "ref_kl_weights": [0.0] * 4}, False),
    ],
)
def test_a_rollout_trains_if_a_component_has_a_member_token(make_sample, streams, expected):
    nothing = make_sample(rl_weights=[0.0] * 4)
    assert trains(SimpleNamespace(samples=[nothing, make_sample(**streams)]), 4) is expected


def test_what_is_cut_away_trains_nothing(make_sample):
    late = [0.0, 0.0, 0.0, 0.5]
    for streams in (
        {"rl_weights": late},
        *({"rl_weights": [0.0] * 4, name: late} for name in ("ce_weights", "ref_kl_weights")),
    ):
        rollout = SimpleNamespace(samples=[make_sample(**streams)])
        assert [trains(rollout, seq_len) for seq_len in (2, 3, 4, 9)] == [False, False, True, True]
    assert [trains(SimpleNamespace(samples=[make_sample()]), seq_len) for seq_len in (1, 2)] == [
        False,
        True,
    ]  # a prompt of one


def test_reasons_are_named_by_frequency_and_trained_rollouts_have_none(make_rollout):
    late, early = [make_rollout() for _ in range(3)], [make_rollout() for _ in range(2)]
    for rollout in late:
        drop(rollout, "post_batch", "zero_advantage")
    for rollout in early:
        drop(rollout, "pre_batch", "gibberish")
    trained, failed, unlearnable = make_rollout(), make_rollout(error="EngineError: gone"), make_rollout()
    end([trained], Stage.TRAINED)
    end([unlearnable])
    assert why_untrained([*early, *late, trained]) == "filter zero_advantage: 3, filter gibberish: 2"
    why = why_untrained([unlearnable, *late[:2], failed])
    assert why.startswith("filter zero_advantage: 2")
    assert "EngineError: gone: 1" in why and "nothing of it within trainer.seq_len feeds a loss: 1" in why


def test_only_what_the_policy_generated_has_an_age(make_rollout):
    rollouts = [
        make_rollout(env="math", version=4),
        make_rollout(env="math", version=1),
        make_rollout(1.0, env="imitating", version=None),
        make_rollout(env="imitating", version=0, error="EngineError: http://teacher is gone"),
    ]
    line = of_batch(end(rollouts), step=5)
    assert (line["off_policy/mean"], line["off_policy/max"]) == (1.5, 3.0)
    assert line["reward/imitating/mean"] == 1.0 and line["rollouts/batch"] == 3.0, "it counts everywhere else"


def test_a_batch_of_frozen_rollouts_has_no_age_at_all(make_rollout):
    line = of_batch(end([make_rollout(version=None) for _ in range(3)]), step=500)
    assert (line["off_policy/mean"], line["off_policy/max"]) == (0.0, 0.0)


def test_scoring_time_is_the_mean_over_what_was_scored(make_rollout):
    rollouts = [make_rollout(), make_rollout(), make_rollout(error="EngineError: no")]
    for rollout, seconds in zip(rollouts, (0.5, 1.5, 100.0), strict=True):
        rollout.scoring_s = seconds
    assert of_batch(end(rollouts), step=1)["time/scoring"] == 1.0


def test_the_line_of_a_step_joins_both_sides_and_its_rates(caplog):
    shipped = {"step": 3, "off_policy/max": 0.0, "tokens/generated": 500.0}
    line = joined(shipped, {"tokens/trained": 200.0, "logprob_gap/mean": 0.06}, wall_s=2.0, busy_s=1.5)
    assert line == shipped | {
        "tokens/trained": 200.0,
        "logprob_gap/mean": 0.06,
        "time/step": 2.0,
        "idle/engine": 0.25,
        "tokens/generated_per_second": 250.0,
        "tokens/trained_per_second": 100.0,
    }
    assert "step 3 is on-policy, yet sampler and trainer differ by 0.06 per token" in caplog.text
    caplog.clear()
    joined(shipped | {"off_policy/max": 1.0}, {"tokens/trained": 0.0, "logprob_gap/mean": 0.06}, wall_s=2.0, busy_s=1.5)
    assert not caplog.text


DRAWS = {
    "even": lambda chance: chance.random(),
    "right or wrong": lambda chance: float(chance.random() < 0.5),
    "tenths": lambda chance: chance.choice([0.1, 0.2, 0.3]),
    "of both signs": lambda chance: chance.gauss(0, 1),
    "of all sizes": lambda chance: chance.gauss(0, 1) * 10.0 ** chance.randint(-300, 300),
    "tiny": lambda chance: 5e-324 * chance.randint(-3, 3),
    "counts": lambda chance: chance.randint(0, 1000),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_means_and_quantiles_to_the_last_bit(draw):
    """The mean is that of exact fractions, rounded once; quantiles are numpy's."""
    chance = random.Random(0)
    for n in [1, 2, 3, 5, 8, 31, 128, 256] * 40:
        values = [draw(chance) for _ in range(n)]
        assert mean(values) == float(sum(map(Fraction, values)) / n)
        assert mean(values[:1] * n) == values[0]
        assert list(quantiles(values).values()) == np.quantile(values, list(QUANTILES.values())).tolist()


def test_the_mean_of_what_has_no_sum():
    assert mean([1e308] * 3) == 1e308 and mean([1e308, math.inf]) == math.inf
    assert math.isnan(mean([math.nan, 1.0])) and math.isnan(mean([math.inf, -math.inf]))


def test_all_is_what_the_envs_hold_together(make_rollout):
    """Of one env, whose numbers are taken over, and of two, of which they are made anew."""
    one = end([make_rollout(reward, env="a", version=3) for reward in (0.0, 1.0, 1.0)])
    other = end([make_rollout(reward, env="b", version=1) for reward in (0.5, 0.25)])
    line = of_batch(one, step=4)
    shared = [key for key in line if "/a/" in key and not key.startswith("metric/")]
    assert len(shared) > 15 and all(line[key] == line[key.replace("/a/", "/all/")] for key in shared)
    line = of_batch([*other, *one], step=4)
    assert line["reward/all/mean"] == mean([0.0, 1.0, 1.0, 0.5, 0.25]) and line["reward/all/p50"] == 0.5
    assert (line["off_policy/all/min"], line["off_policy/all/p50"], line["off_policy/all/max"]) == (0.0, 0.0, 2.0)
