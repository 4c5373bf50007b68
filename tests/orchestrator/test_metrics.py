"""The numbers of a batch, by hand."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.base.metric_names import QUANTILES
from prl.filters.base import Filter
from prl.orchestrator.batcher import trains
from prl.orchestrator.metrics import line_of_step, mean, metrics_of_batch, metrics_of_filters, quantiles, take_logged
from prl.rollouts.rollout import Stage


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


def test_numbers_of_a_batch_of_three_envs(make_rollout):
    rollouts = [
        make_rollout(1.0, env="math", version=4),
        make_rollout(0.0, env="math", version=2),
        make_rollout(0.5, env="reverse", version=3),
        make_rollout(1.0, env="imitating", version=None),
        make_rollout(9.0, env="reverse", version=0, error="ValueError: no"),
    ]
    rollouts[0].trace.record_metric("correct", 1.0)
    rollouts[1].trace.metrics["correct"] = None  # seeded by verifiers, never set
    for rollout, seconds in zip(rollouts, (0.5, 1.5, 0.0, 2.0, 100.0), strict=True):
        rollout.scoring_s = seconds
    end(rollouts[:1], Stage.TRAINED)
    line = metrics_of_batch(end(rollouts), step=5)
    rewards = {env: line[f"reward/{env}/mean"] for env in ("all", "math", "reverse", "imitating")}
    assert rewards == {"all": 2.5 / 4, "math": 0.5, "reverse": 0.5, "imitating": 1.0}
    assert (line["reward/all/p50"], line["metric/math/correct"], line["time/scoring"]) == (0.75, 0.5, 1.0)
    assert line["off_policy/mean"] == pytest.approx((0 + 2 + 1) / 3) and line["off_policy/max"] == 2.0
    assert (line["rollouts/batch"], line["rollouts/trained"], line["rollouts/filtered"]) == (4.0, 1.0, 0.0)


def test_the_spread_of_each_number_by_hand(make_rollout):
    """Of five values 0, 1, 2, 3, 10 the deciles lie 0.4 of a step from the ends: 0.4 and 3 + 0.6 * 7."""
    rollouts = [make_rollout(reward, env="math", version=5 - int(reward)) for reward in (3.0, 0.0, 10.0, 1.0, 2.0)]
    for rollout in rollouts:
        rollout.assign_advantages(-rollout.reward)
    rollouts += [make_rollout(0.5, env="reverse", version=None), make_rollout(7.0, env="math", error="no")]
    line = metrics_of_batch(end(rollouts), step=6)
    spread = {"min": 0.0, "p10": 0.4, "p50": 2.0, "p90": 7.2, "max": 10.0}
    for name, value in spread.items():
        assert line[f"reward/math/{name}"] == line[f"off_policy/math/{name}"] == pytest.approx(value)
    assert line["advantage/math/p10"] == pytest.approx(-7.2) and line["advantage/math/max"] == 0.0
    assert line["reward/reverse/min"] == line["reward/reverse/max"] == 0.5
    assert "off_policy/reverse/p50" not in line, "a frozen model's rollouts have no age"
    assert "advantage/reverse/p50" not in line, "nor credit that nobody assigned"
    assert line["reward/all/p50"] == 1.5


def test_shares_of_slots_and_filters_by_hand(make_rollout, filters):
    math = [make_rollout(env="math") for _ in range(4)]
    reverse = [make_rollout(env="reverse") for _ in range(2)]
    failed, empty = make_rollout(env="math", error="ValueError: no"), make_rollout(env="math")
    empty.leave(Stage.EMPTY, "nothing was sampled")
    drop(math[0], "pre_batch", "gibberish")
    math[1].matched["pre_batch"] = "repetition"  # a monitor's: the second slot is asked too
    drop(math[1], "post_batch", "zero_advantage")
    math[2].matched["post_batch"] = "repetition"
    assert metrics_of_filters(end([*math, *reverse, failed, empty]), filters) == {
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


def test_rollouts_dropped_before_a_batch_count_in_rewards(make_rollout):
    rollouts = [make_rollout(1.0, version=4), make_rollout(0.0, version=1)]
    drop(rollouts[1], "pre_batch", "repetition")
    line = metrics_of_batch(end(rollouts, Stage.TRAINED), step=5)
    assert line["reward/all/mean"] == line["reward/toy/mean"] == 0.5
    assert (line["rollouts/batch"], line["rollouts/trained"], line["rollouts/filtered"]) == (1.0, 1.0, 1.0)
    assert (line["off_policy/mean"], line["off_policy/max"]) == (0.0, 0.0)


def test_a_batch_of_nothing_but_errors_has_finite_numbers(make_rollout):
    line = metrics_of_batch([make_rollout(error="x")], step=3)
    assert line["rollouts/batch"] == line["off_policy/max"] == line["reward/all/mean"] == 0.0
    assert all(map(math.isfinite, line.values()))


def test_metrics_that_are_no_numbers_are_left_out(make_rollout):
    rollouts = [make_rollout() for _ in range(5)]
    for rollout, value in zip(rollouts, (1.0, math.nan, math.inf, -math.inf, 2.0), strict=True):
        rollout.trace.record_metric("depth", value)
    rollouts[1].trace.record_metric("lost", math.nan)
    line = metrics_of_batch(end(rollouts), step=1)
    assert line["metric/toy/depth"] == 1.5 and line["metric/toy/lost"] == 0.0
    line = metrics_of_batch(rollouts[1:2], step=1)
    assert line["metric/toy/lost"] == 0.0, "no number at all"


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
def test_rollout_trains_if_a_token_feeds_a_component(make_sample, streams, expected):
    nothing = make_sample(rl_weights=[0.0] * 4)
    assert trains(SimpleNamespace(samples=[nothing, make_sample(**streams)]), 4) is expected


@pytest.mark.parametrize("stream", ["rl_weights", "ce_weights", "ref_kl_weights"])
def test_tokens_beyond_seq_len_train_nothing(make_sample, stream):
    rollout = SimpleNamespace(samples=[make_sample(**{"rl_weights": [0.0] * 4, stream: [0.0, 0.0, 0.0, 0.5]})])
    assert [trains(rollout, seq_len) for seq_len in (2, 3, 4, 9)] == [False, False, True, True]


def test_line_of_a_step_by_hand(caplog):
    shipped = {"step": 3, "off_policy/max": 0.0, "tokens/generated": 500.0}
    line = line_of_step(shipped, {"tokens/trained": 200.0, "logprob_gap/mean": 0.06}, wall_s=2.0, busy_s=1.5, half=True)
    assert line == shipped | {
        "tokens/trained": 200.0,
        "logprob_gap/mean": 0.06,
        "time/step": 2.0,
        "idle/engine": 0.25,
        "tokens/generated_per_second": 250.0,
        "tokens/trained_per_second": 100.0,
    }
    assert "step 3 is on-policy, yet sampler and trainer differ by 0.06 per token" in caplog.text


@pytest.mark.parametrize(
    ("gap", "half", "age", "warns"),
    [
        (0.06, True, 0.0, True),
        (0.04, True, 0.0, False),
        (0.006, False, 0.0, True),  # of frequencies that follow the longest sequence of a batch
        (2e-6, False, 0.0, False),
        (0.06, False, 1.0, False),
    ],
)
def test_a_gap_above_what_the_number_format_explains_warns_on_policy(caplog, gap, half, age, warns):
    shipped = {"step": 1, "off_policy/max": age, "tokens/generated": 1.0}
    line_of_step(shipped, {"tokens/trained": 1.0, "logprob_gap/mean": gap}, wall_s=1.0, busy_s=1.0, half=half)
    assert bool(caplog.text) == warns


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40))
def test_mean_and_quantiles_are_those_of_exact_arithmetic(values):
    assert mean(values) == pytest.approx(float(sum(map(Fraction, values)) / len(values)), rel=1e-15, abs=1e-300)
    assert mean(values) == mean(values[::-1]), "whatever the order"
    found = quantiles([*values, None, math.nan])
    assert list(found.values()) == np.quantile(values, list(QUANTILES.values())).tolist()


def test_mean_and_quantiles_of_nothing():
    assert mean([]) == 0.0 and quantiles([None]) == {}


def test_logged_values_are_means_of_the_step_by_env(make_env, zero):
    one, two = make_env("one", pre={"zero": zero()}), make_env("two")
    for component, value in ((one.algorithm, 1.0), (one.filters["pre_batch"]["zero"], 4), (two.curriculum, 2.0)):
        component.log("size", value)
    one.algorithm.log("size", float("nan"))
    two.algorithm.log("gone", float("inf"))
    assert take_logged([one, two]) == {"log/one/size": 2.5, "log/two/size": 2.0}
    assert take_logged([one, two]) == {}
