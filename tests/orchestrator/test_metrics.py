"""The numbers of a batch, by hand."""

import pytest

from prl.orchestrator.metrics import mean, of_batch, trains, why_empty


def test_a_batch_of_two_envs(make_rollout):
    rollouts = [
        make_rollout(1.0, env="math", version=4),
        make_rollout(0.0, env="math", version=2),
        make_rollout(0.5, env="reverse", version=3),
        make_rollout(9.0, env="reverse", version=0, error="ValueError: no"),
    ]
    rollouts[1].filtered_by = "zero_advantage"
    rollouts[0].trace.record_metric("correct", 1.0)
    rollouts[1].trace.metrics["correct"] = None  # seeded by verifiers, never set
    line = of_batch(rollouts, rollouts[:1], step=5)
    assert line["reward/all/mean"] == pytest.approx(0.5)
    assert line["reward/math/mean"] == line["reward/reverse/mean"] == 0.5
    assert line["filters/all/is_filtered"] == pytest.approx(1 / 3)
    assert line["filters/math/is_filtered"] == 0.5 and line["filters/reverse/is_filtered"] == 0.0
    assert line["metric/math/correct"] == 0.5
    assert line["off_policy/mean"] == pytest.approx((0 + 2 + 1) / 3) and line["off_policy/max"] == 2.0
    assert (line["rollouts/batch"], line["rollouts/trained"], line["rollouts/errored"]) == (3.0, 1.0, 1.0)


def test_a_metric_that_only_some_rollouts_have_counts_as_zero_for_the_others(make_rollout):
    rollouts = [make_rollout(), make_rollout()]
    rollouts[1].trace.record_metric("used_a_tool", 1.0)
    assert of_batch(rollouts, rollouts, step=1)["metric/toy/used_a_tool"] == 0.5


def test_a_batch_of_nothing_but_errors_has_finite_numbers(make_rollout):
    line = of_batch([make_rollout(error="x")], [], step=3)
    assert line["rollouts/errored"] == 1.0 and line["off_policy/max"] == line["reward/all/mean"] == 0.0


def test_mean_of_nothing_is_zero():
    assert mean([]) == 0.0 and mean(iter([1.0, 2.0])) == 1.5


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
def test_a_sample_trains_if_a_component_has_a_member_token(make_sample, streams, expected):
    assert trains(make_sample(**streams)) is expected


def test_why_empty_names_the_most_frequent_reason_first(make_rollout):
    dropped = make_rollout()
    dropped.filtered_by, dropped.dropped = "zero_advantage", True
    rollouts = [make_rollout(), dropped, dropped, make_rollout(error="EngineError: gone")]
    why = why_empty(rollouts)
    assert why.startswith("filter zero_advantage: 2")
    assert "EngineError: gone: 1" in why and "no trainable token: 1" in why


def test_only_what_the_policy_generated_has_an_age(make_rollout):
    rollouts = [
        make_rollout(env="math", version=4),
        make_rollout(env="math", version=1),
        make_rollout(1.0, env="imitating", version=None),
        make_rollout(env="imitating", version=0, error="EngineError: http://teacher is gone"),
    ]
    line = of_batch(rollouts, rollouts[:3], step=5)
    assert (line["off_policy/mean"], line["off_policy/max"]) == (1.5, 3.0)
    assert line["reward/imitating/mean"] == 1.0 and line["rollouts/batch"] == 3.0, "it counts everywhere else"


def test_a_batch_of_frozen_rollouts_has_no_age_at_all(make_rollout):
    line = of_batch([make_rollout(version=None) for _ in range(3)], [], step=500)
    assert (line["off_policy/mean"], line["off_policy/max"]) == (0.0, 0.0)


def test_scoring_time_is_the_mean_over_what_was_scored(make_rollout):
    rollouts = [make_rollout(), make_rollout(), make_rollout(error="EngineError: no")]
    for rollout, seconds in zip(rollouts, (0.5, 1.5, 100.0), strict=True):
        rollout.scoring_s = seconds
    assert of_batch(rollouts, rollouts[:2], step=1)["time/scoring"] == 1.0
