"""Advantages in plain numbers: from the rewards of one group to one advantage per rollout."""

import statistics
from collections.abc import Sequence

from prl.rollouts.rewards import equal, rounding


def centred(values: Sequence[float]) -> list[float]:
    """Each value minus the mean; exactly zero where the difference is within rounding of the values.

    Only an exact zero counts as no gradient. Computed around the first value, so that little is lost to rounding.
    """
    first = values[0]
    offset = sum(value - first for value in values) / len(values)
    tolerance = rounding(*values)
    differences = [value - first - offset for value in values]
    return [0.0 if abs(difference) <= tolerance else difference for difference in differences]


def leave_one_out(centred: Sequence[float]) -> list[float]:
    """Each reward minus the mean of the *others*, of rewards minus their mean: n / (n - 1) times that; 0 where n is 1.

    Source: RLOO (arXiv 2402.14740).
    """
    n = len(centred)
    return [value * n / (n - 1) if n > 1 else 0.0 for value in centred]


def std_normalized(advantages: Sequence[float], centred: Sequence[float]) -> list[float]:
    """Advantages divided by the standard deviation of the rewards, plus 1e-6 against division by zero.

    The deviation is the sample's (n - 1), which needs the rewards minus their mean alone. Equal rewards, and a group of
    one, have advantages of exactly 0. Source: GRPO (arXiv 2402.03300), as TRL and verl compute it.
    """
    std = statistics.stdev(centred) if len(centred) > 1 else 0.0
    return [value / (std + 1e-6) for value in advantages]


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """The return of each turn j of a rollout, the sum over m >= j of gamma^(m-j) times the reward of turn m."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + gamma * returns[-1] if returns else reward)
    return returns[::-1]


def overlong_penalty(tokens: int, max_tokens: int, buffer: int) -> float:
    """Return what is added to the reward of a completion: 0 up to `max_tokens - buffer` tokens, -1 above `max_tokens`.

    In between it falls in a straight line. Source: DAPO (arXiv 2503.14476, equation 13).
    """
    if tokens > max_tokens:
        return -1.0
    # With a buffer of 0 the numerator is not negative here: the penalty is a step.
    return min(0.0, (max_tokens - buffer - tokens) / max(buffer, 1))


def mean_normalized(rewards: Sequence[float]) -> list[float]:
    """Return (reward - mean) / mean of each reward; all zero where the mean is not above zero.

    Source: MaxRL (arXiv 2602.02710).

    A mean within rounding of zero counts as zero.
    """
    mean = sum(rewards) / len(rewards)
    if mean <= rounding(*rewards):
        return [0.0] * len(rewards)
    return [value / mean for value in centred(rewards)]


def efficiency_shaping(rewards: Sequence[float], costs: Sequence[float]) -> list[float]:
    """Rewards that favour the cheaper of the best rollouts; a worse rollout gains nothing by being short.

    A rollout is correct when its reward equals the group's maximum, up to rounding; m is the mean cost of the correct
    ones, and `shaped = reward * (1 + clamp(1 - cost / m, 0, 1))` for them, the plain reward for the others.

    Args:
        rewards: `[rollouts]`.
        costs: `[rollouts]`, in tokens or turns; only ratios matter.

    Returns:
        `[rollouts]`, shaped; the rewards as they are where the maximum or m is not above zero.
    """
    best = max(rewards)
    correct = [equal(reward, best) for reward in rewards]
    # The best rollout is equal to itself, so that this divides by at least 1.
    mean_cost = sum(cost for cost, right in zip(costs, correct, strict=True) if right) / sum(correct)
    if best <= 0 or mean_cost <= 0:
        return list(rewards)
    bonuses = [min(max(1.0 - cost / mean_cost, 0.0), 1.0) for cost in costs]
    return [r * (1.0 + b * right) for r, b, right in zip(rewards, bonuses, correct, strict=True)]
