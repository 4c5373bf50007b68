"""Statistics of an evaluation's rewards: avg@k and pass@k, with intervals over tasks, and differences to a base."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

import msgspec
from scipy.special import stdtrit

from prl.rollouts.rewards import at_least
from prl.rollouts.rollout import Rollout

CONFIDENCE = 0.95


class Estimate(msgspec.Struct, frozen=True):
    """A mean over tasks and its 95 % interval, which a single task does not have."""

    mean: float
    low: float | None = None
    high: float | None = None


class TaskScore(msgspec.Struct, kw_only=True):
    """One task under one target."""

    n: int
    """Episodes: samples of the task."""
    correct: int
    errored: int
    """Failed episodes. They have reward 0 and are not correct."""
    mean_reward: float
    pass_at: dict[str, float]
    """k -> pass@k, for k = 1, 2, 4, … and n."""


class EnvScore(msgspec.Struct, kw_only=True):
    """One env under one target."""

    env: str
    tasks: int
    k: int
    avg: Estimate
    """avg@k: mean reward."""
    pass_at: dict[str, Estimate] = msgspec.field(name="pass@k")
    errored: float
    """Share of episodes that failed."""
    difference: Estimate | None = None
    """avg@k minus that of the first target on the same tasks; null for the first."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The probability that at least one of `k` of `n` samples, drawn without replacement, is correct.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of pass@k from n samples (Chen et al. 2021, arXiv 2107.03374).
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def powers(n: int) -> list[int]:
    """1, 2, 4, … and n."""
    return [*(2**e for e in range(n.bit_length()) if 2**e < n), n]


def estimate(values: Sequence[float], low: float = -math.inf, high: float = math.inf) -> Estimate:
    """The mean of one value per task, with Student's t interval, cut at `low` and `high`.

    The task is the unit: samples of one task are not independent, tasks are (clustered standard errors; Miller 2024,
    arXiv 2411.00640).
    """
    mean, count = fmean(values), len(values)
    if count < 2:
        return Estimate(mean)
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * stdev(values) / math.sqrt(count)
    return Estimate(mean, max(low, mean - half), min(high, mean + half))


def score_tasks(rollouts: Iterable[Rollout], correct_at: float) -> list[TaskScore]:
    """The score of each task of one env, in order.

    A sample is an episode. Its reward is the mean of its agents' rewards, a failed one's 0; it is correct if none of
    them failed and each earned at least `correct_at`, up to rounding.
    """
    tasks: dict[int, dict[int, list[Rollout]]] = {}
    for rollout in rollouts:
        tasks.setdefault(rollout.group_id, {}).setdefault(rollout.index, []).append(rollout)
    return [_score_task(list(episodes.values()), correct_at) for _, episodes in sorted(tasks.items())]


def _score_task(episodes: list[list[Rollout]], correct_at: float) -> TaskScore:
    n = len(episodes)
    correct = sum(all(not r.failed and at_least(r.reward, correct_at) for r in episode) for episode in episodes)
    return TaskScore(
        n=n,
        correct=correct,
        errored=sum(any(r.failed for r in episode) for episode in episodes),
        mean_reward=fmean(fmean(0.0 if r.failed else r.reward for r in episode) for episode in episodes),
        pass_at={str(k): pass_at_k(n, correct, k) for k in powers(n)},
    )


def score_env(env: str, tasks: Sequence[TaskScore], base: Sequence[TaskScore] | None) -> EnvScore:
    """The score of an env from those of its tasks; `base` are the first target's, None for the first itself."""
    differences = None
    if base is not None:
        differences = [task.mean_reward - other.mean_reward for task, other in zip(tasks, base, strict=True)]
    return EnvScore(
        env=env,
        tasks=len(tasks),
        k=tasks[0].n,
        avg=estimate([task.mean_reward for task in tasks]),
        pass_at={k: estimate([task.pass_at[k] for task in tasks], 0.0, 1.0) for k in tasks[0].pass_at},
        errored=sum(task.errored for task in tasks) / sum(task.n for task in tasks),
        difference=None if differences is None else estimate(differences),
    )
