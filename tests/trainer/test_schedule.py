"""The learning rate, worked by hand."""

import pytest

from prl.trainer.schedule import Constant, Cosine, Linear


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Linear(decay_fraction=0.5, min_ratio=0.2), [1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        (Linear(warmup_steps=3, decay_fraction=0.2, min_ratio=0.0), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.5, 0]),
        (Linear(), [0.775, 0.55, 0.325, 0.1]),
        (Linear(decay_fraction=0.0, min_ratio=0.0), [1.0] * 5),
        (Linear(decay_fraction=0.4, min_ratio=0.0), [1.0]),  # 0.4 of one step rounds to none
        # 0.1 + 0.9 (1 + cos(pi p)) / 2 at p = 1/4, 1/2, 3/4, 1
        (Cosine(), [0.1 + 0.9 * 0.8535534, 0.55, 0.1 + 0.9 * 0.1464466, 0.1]),
        (Constant(warmup_steps=1), [0.5, 1, 1, 1]),
    ],
)
def test_factors_by_hand(schedule, expected):
    steps = range(1, len(expected) + 1)
    assert [schedule.factor(step, len(expected)) for step in steps] == pytest.approx(expected)
