"""avg@k, pass@k and their intervals: worked out by hand, by enumeration, and against scipy.stats."""

import itertools
from types import SimpleNamespace

import pytest
from scipy import stats

from prl.tools.evaluation.scores import Estimate, estimate, pass_at_k, score_env, score_tasks


def test_pass_at_k_is_the_share_of_solved_subsets():
    for n in range(1, 8):
        for correct in range(n + 1):
            samples = [i < correct for i in range(n)]
            for k in range(1, n + 1):
                subsets = [any(subset) for subset in itertools.combinations(samples, k)]
                assert pass_at_k(n, correct, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_the_interval_is_students_over_tasks():
    found = estimate([0.0, 1.0])  # t(1 degree of freedom, 0.975) = 12.706; s / sqrt(2) = 0.5
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5 - 6.3531, 0.5 + 6.3531), abs=1e-4)
    values = [0.1, 0.4, 0.35, 0.8, 0.0, 1.0, 0.25]
    found = estimate(values)
    assert (found.low, found.high) == pytest.approx(
        stats.t.interval(0.95, len(values) - 1, loc=found.mean, scale=stats.sem(values))
    )


def test_interval_of_shares_ends_at_0_and_1():
    assert estimate([0.0, 1.0], 0.0, 1.0) == Estimate(0.5, 0.0, 1.0)
    assert estimate([0.25]) == Estimate(0.25, None, None)
    assert estimate([1.0, 1.0, 1.0]) == Estimate(1.0, 1.0, 1.0)


def rollout(task, index, reward, *, failed=False):
    return SimpleNamespace(group_id=task, index=index, reward=reward, failed=failed)


def test_failed_episode_counts_as_wrong_and_is_reported():
    rollouts = [rollout(0, 0, 1.0), rollout(0, 1, 1.0, failed=True), rollout(0, 2, 0.9), rollout(0, 3, 0.1)]
    [task] = score_tasks(rollouts, 1.0)
    assert (task.n, task.correct, task.errored, task.mean_reward) == (4, 1, 1, 0.5)
    assert task.pass_at == {"1": 0.25, "2": 0.5, "4": 1.0}
    [lenient] = score_tasks(rollouts, 0.9)
    assert lenient.correct == 2


def test_reward_of_1_but_for_rounding_is_correct():
    rollouts = [rollout(0, 0, 0.7 + 0.2 + 0.1), rollout(0, 1, 0.7 + 0.2)]
    [task] = score_tasks(rollouts, 1.0)
    assert (task.correct, task.pass_at) == (1, {"1": 0.5, "2": 1.0})


def test_an_episode_of_two_agents_is_one_sample():
    rollouts = [rollout(0, 0, 1.0), rollout(0, 0, 0.0), rollout(0, 1, 1.0), rollout(0, 1, 1.0)]
    [task] = score_tasks(rollouts, 1.0)
    assert (task.n, task.correct, task.mean_reward) == (2, 1, 0.75)


def test_the_difference_to_the_base_is_paired_by_task():
    base = score_tasks([rollout(0, 0, 0.0), rollout(1, 0, 1.0), rollout(2, 0, 0.0)], 1.0)
    other = score_tasks([rollout(2, 0, 0.5), rollout(0, 0, 0.5), rollout(1, 0, 1.5)], 1.0)  # in any order
    score = score_env("toy", other, base)
    assert score.difference == Estimate(0.5, 0.5, 0.5), "the same for every task, however much tasks differ"
    assert score.avg.low < 0.0 < score.avg.high
    assert score_env("toy", base, None).difference is None
    assert (score.tasks, score.k, score.errored) == (3, 1, 0.0)
    assert score_env("toy", base, None).pass_at["1"].mean == pytest.approx(1 / 3)
