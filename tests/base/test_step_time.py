"""The time of a step against numbers worked out by hand."""

import math

import pytest

from prl.base.step_time import mean_step


def test_a_step_is_the_mean_between_the_first_and_the_last():
    """Pairs of .9 and .1 s after a first step that ended at 30 s: 3 s for six steps, where the median is .1 or .9."""
    assert mean_step([30.0, 30.9, 31.0, 31.9, 32.0, 32.9, 33.0]) == pytest.approx(0.5)
    assert mean_step([2.0, 5.0]) == 3.0


@pytest.mark.parametrize("ends", [[], [7.0]])
def test_one_step_has_no_mean(ends):
    assert math.isnan(mean_step(ends))
