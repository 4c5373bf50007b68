"""The learning rate, worked by hand."""

import pytest

from prl.config.instantiate import build
from prl.errors import ConfigError
from prl.trainer.config import TrainerConfig
from prl.trainer.schedule import Schedule, WarmupDecay


def factors(max_steps, **settings):
    return [WarmupDecay(**settings).factor(step, max_steps) for step in range(1, max_steps + 1)]


def test_linear_decay_over_the_last_half():
    found = factors(8, decay="linear", decay_fraction=0.5, min_ratio=0.2)
    assert found == pytest.approx([1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_warmup_then_plateau_then_decay():
    found = factors(10, warmup_steps=3, decay="linear", decay_fraction=0.2, min_ratio=0.0)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.5, 0])


def test_cosine():
    found = factors(4, decay="cosine", decay_fraction=1.0, min_ratio=0.1)
    # 0.1 + 0.9 (1 + cos(pi p)) / 2 at p = 1/4, 1/2, 3/4, 1
    assert found == pytest.approx([0.1 + 0.9 * 0.8535534, 0.55, 0.1 + 0.9 * 0.1464466, 0.1])


def test_constant_ignores_the_decay():
    assert factors(5, decay="constant", decay_fraction=1.0, min_ratio=0.0) == [1.0] * 5


def test_no_decay_steps():
    assert factors(5, decay_fraction=0.0, min_ratio=0.0) == [1.0] * 5
    assert factors(1, decay_fraction=0.4, min_ratio=0.0) == [1.0]  # 0.4 of one step rounds to none


def test_defaults():
    """Down to a tenth of the peak, from the first step on."""
    found = factors(60)
    assert found[0] == pytest.approx(1 - 0.9 / 60) and found[-1] == pytest.approx(0.1)
    assert sorted(found, reverse=True) == found


def test_the_trainers_default_is_a_node_of_it():
    found = build(TrainerConfig().schedule, Schedule, "trainer.schedule")
    assert found == WarmupDecay()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"decay": "exponential"}, r"schedule\.decay='exponential': choose constant, linear or cosine"),
        ({"warmup_steps": -1}, r"schedule\.warmup_steps must be at least 0, got -1"),
        ({"decay_fraction": 1.5}, r"schedule\.decay_fraction must be from 0 to 1, got 1\.5"),
        ({"min_ratio": -0.1}, r"schedule\.min_ratio must be from 0 to 1, got -0\.1"),
        ({"warmup": 3}, r"schedule\.warmup: WarmupDecay has no such knob; did you mean schedule\.warmup_steps"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(knobs, message):
    node = {"_target_": "prl.trainer.schedule.WarmupDecay"} | knobs
    with pytest.raises(ConfigError, match=message):
        build(node, Schedule, "schedule")
