"""Rewards that are equal but for rounding, of any size, and those that are not."""

import math

import pytest

from prl.rollouts.rewards import at_least, at_most, equal

PARTS = 0.7 + 0.2 + 0.1  # 0.9999999999999999


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PARTS, 1.0),
        (0.1 + 0.2, 0.3),
        (0.1 + 0.2 - 0.3, 0.0),
        (-(0.1 + 0.2), -0.3),
        (sum([0.1] * 1000), 100.0),
        (sum([0.1] * 100) - 10.0, 0.0),
        ((0.1 + 0.2) * 1e6, 0.3e6),
        ((0.1 + 0.2) * 1e-9, 0.3e-9),
        (5.0, 5.0),
    ],
)
def test_rounding_makes_no_difference(one, other):
    assert equal(one, other) and equal(other, one)
    assert at_least(one, other) and at_least(other, one) and at_most(one, other) and at_most(other, one)


@pytest.mark.parametrize(
    ("less", "more"),
    [(0.999999, 1.0), (1e-9, 2e-9), (0.0, 1e-9), (1e6, 1e6 + 1e-3), (-2e-9, -1e-9), (1e-11, 2e-11), (-1.0, 1.0)],
)
def test_what_is_meant_is_a_difference(less, more):
    assert not equal(less, more) and not at_least(less, more) and not at_most(more, less)
    assert at_least(more, less) and at_most(less, more)


def test_a_bound_that_nothing_reaches_is_never_reached():
    assert not at_least(1e300, math.inf) and not at_most(-1e300, -math.inf)
    assert at_least(-1e300, -math.inf) and at_most(1e300, math.inf)
