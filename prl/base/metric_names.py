"""Names of metrics that more than one part of prl reads; `prl/METRICS.md` declares them all."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

Value = TypeVar("Value")

QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
"""Quantiles that show the spread of a number, by name: the last part of a metric's key."""
SAMPLED = "reward/all/mean"
"""The mean reward of a step's rollouts."""
HELD_OUT = "eval/*/avg@*"
"""Pattern of the held-out rewards, one for each env."""
REWARDS = (HELD_OUT, SAMPLED)
"""Metrics that runs are compared by where nothing else is asked for; without an evaluation the second is left."""


def held_out(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Return the held-out rewards among a step's metrics."""
    return {key: value for key, value in metrics.items() if fnmatchcase(key, HELD_OUT)}
