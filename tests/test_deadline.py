"""Deadlines that follow from what was seen."""

import pytest

from prl.deadline import Deadline


def test_nothing_seen_leaves_the_upper_bound():
    assert Deadline().limit(1800.0) == 1800.0


@pytest.mark.parametrize(
    ("seen", "limit"),
    [([0.5, 0.1], 60.0), ([6.0], 60.0), ([7.0, 0.2], 70.0), ([100.0, 9.0, 40.0], 1000.0), ([500.0], 1800.0)],
)
def test_a_multiple_of_the_slowest_between_floor_and_upper_bound(seen, limit):
    deadline = Deadline()
    for seconds in seen:
        deadline.seen(seconds)
    assert deadline.limit(1800.0) == limit


def test_an_upper_bound_below_the_floor_holds():
    deadline = Deadline(floor_s=60.0)
    deadline.seen(0.1)
    assert deadline.limit(5.0) == 5.0
