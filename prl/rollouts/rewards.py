"""Rewards that are equal but for rounding are equal, for credit, filters, difficulty, evaluation and early stopping.

A reward is often a sum of weighted parts, and floats round each addition: 0.7 + 0.2 + 0.1 is 1 - 1e-16, 0.1 + 0.2 - 0.3
is 6e-17, and a hundred times 0.1 minus 10 is 2e-14.
"""

RELATIVE = 1e-12
"""Rounding of a sum of a few thousand parts, relative to the largest; far below any difference that is meant."""
SMALLEST = 1.0
"""Below this the parts of a reward may be larger than itself, and their rounding counts: 1e-12."""


def rounding(*rewards: float) -> float:
    """Return how far numbers of the size of `rewards` may be apart by rounding alone."""
    return RELATIVE * max(SMALLEST, *map(abs, rewards))


def at_least(reward: float, bound: float) -> bool:
    """Return whether `reward` is `bound` or more, up to rounding."""
    return reward >= bound - rounding(bound)


def at_most(reward: float, bound: float) -> bool:
    """Return whether `reward` is `bound` or less, up to rounding."""
    return reward <= bound + rounding(bound)


def equal(reward: float, other: float) -> bool:
    """Return whether two rewards are equal up to rounding."""
    return at_least(reward, other) and at_most(reward, other)
