"""Arithmetic of credit against the same formulas in exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.algorithms.advantage import centred, efficiency_shaping, leave_one_out, mean_normalized, std_normalized

eighths = st.integers(-80, 80).map(lambda i: i / 8)  # their sums are exact, so that comparisons with zero are
rewards = st.lists(eighths, min_size=1, max_size=12)
anything = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=16)
pairs = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0]) | eighths, st.integers(0, 40).map(lambda i: i / 4)),
    min_size=1,
    max_size=12,
)


def exact(values):
    return [Fraction(value) for value in values]


def minus_mean(values):
    return [value - sum(values) / Fraction(len(values)) for value in values]


def shaped_exactly(rewards, costs):
    """The definition, word by word, in fractions."""
    r, c = exact(rewards), exact(costs)
    correct = [i for i in range(len(r)) if r[i] == max(r)]
    m = sum(c[i] for i in correct) / len(correct)
    if max(r) <= 0 or m <= 0:
        return r
    shaped = list(r)
    for i in correct:
        bonus = 1 - c[i] / m
        shaped[i] = r[i] * (1 + (0 if bonus < 0 else min(bonus, 1)))
    return shaped


def close(found, expected, scale):
    return len(found) == len(expected) and np.allclose(
        found, [float(e) for e in expected], rtol=1e-12, atol=1e-13 * scale
    )


@given(anything)
def test_centred_is_the_distance_from_the_exact_mean(values):
    assert close(centred(values), minus_mean(exact(values)), scale=10 * (1 + max(map(abs, values))))


@given(st.floats(-1e300, 1e300), st.integers(1, 64))
def test_equal_values_are_centred_to_exactly_zero(value, count):
    assert centred([value] * count) == [0.0] * count


ALIKE = [
    [0.1 + 0.2] * 3 + [0.3] * 5,
    [0.7 + 0.2 + 0.1, 1.0],
    [0.1 + 0.2 - 0.3, 0.0, 0.3 - 0.2 - 0.1],
    [-0.3, -(0.1 + 0.2)],
]


LARGE = [[1e6 * value for value in values] for values in ALIKE[:2]]
SMALL = [[1e-9 * value for value in values] for values in ALIKE]


@pytest.mark.parametrize("values", ALIKE + LARGE + SMALL)
def test_rewards_equal_up_to_rounding_earn_no_credit(values):
    zeros = [0.0] * len(values)
    differences = centred(values)
    assert differences == leave_one_out(differences) == std_normalized(differences, differences) == zeros
    assert mean_normalized(values) == centred(efficiency_shaping(values, [5] * len(values))) == zeros


def test_reward_of_the_mean_up_to_rounding_earns_zero():
    assert centred([0.7 + 0.2 + 0.1, 0.1 + 0.2 - 0.3, 0.5])[2] == 0.0


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1.0, 1e6])
def test_rewards_of_any_size_that_differ_earn_credit(unit):
    assert centred([unit, 2 * unit]) == pytest.approx([-unit / 2, unit / 2])
    assert mean_normalized([unit, 3 * unit]) == pytest.approx([-0.5, 0.5])
    assert centred([1e6, 1e6 + 1e-3]) == pytest.approx([-5e-4, 5e-4], rel=1e-6)


@given(rewards)
def test_mean_normalized_is_its_definition(values):
    mean = sum(exact(values)) / len(values)
    expected = [(value - mean) / mean for value in exact(values)] if mean > 0 else [0] * len(values)
    assert close(mean_normalized(values), expected, scale=1e4)


@pytest.mark.parametrize("values", [[0.0, 0.0], [-1.0, 1.0], [-1.0, 0.5], [-2.0], [0.1, 0.2, -0.3]])
def test_mean_normalized_is_zero_unless_the_mean_is_positive(values):
    assert mean_normalized(values) == [0.0] * len(values)


@given(pairs)
def test_efficiency_shaping_is_its_definition(group):
    values, costs = [r for r, _ in group], [c for _, c in group]
    assert close(efficiency_shaping(values, costs), shaped_exactly(values, costs), scale=100)


@pytest.mark.parametrize(
    ("values", "costs", "shaped"),
    [
        ([1.0, 1.0, 0.0], [10, 30, 5], [1.5, 1.0, 0.0]),  # m = 20: half a bonus, beyond m none, wrong none
        ([1.0, 1.0], [20, 20], [1.0, 1.0]),  # each exactly m
        ([1.0, 1.0], [0, 40], [2.0, 1.0]),  # cost 0: the whole bonus; cost 2m: clamped, not punished
        ([1.0, 0.0, 0.5], [9, 1, 1], [1.0, 0.0, 0.5]),  # one correct rollout: m is its own cost
        ([2.0, 2.0, 1.0], [1, 3, 0], [3.0, 2.0, 1.0]),  # the maximum is correct, whatever it is
        ([1.0, 1.0, 0.0], [0, 0, 9], [1.0, 1.0, 0.0]),  # m = 0: plain
        ([0.0, 0.0, -1.0], [1, 3, 1], [0.0, 0.0, -1.0]),  # max = 0: plain
        ([-0.5, -1.0], [1, 3], [-0.5, -1.0]),  # max < 0: plain
        ([1.0, 1.0], [-3, 1], [1.0, 1.0]),  # m < 0: plain
        ([1.0, 1.0], [-1, 3], [2.0, 1.0]),  # a bonus is at most 1
    ],
)
def test_efficiency_shaping_by_hand(values, costs, shaped):
    assert efficiency_shaping(values, costs) == shaped


def test_rewards_equal_up_to_rounding_are_all_correct():
    """0.7 + 0.2 + 0.1 is 1 - 1.1e-16 in floats: as good as the 1.0 beside it, and a third as expensive. m = 20."""
    assert efficiency_shaping([0.7 + 0.2 + 0.1, 1.0, 0.99], [10, 30, 1]) == pytest.approx([1.5, 1.0, 0.99])
