"""What an entry of the catalogue of metrics is, and names of metrics that more than one part of prl reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Metric:
    """One entry of the catalogue: a pattern of keys, their unit, and what the number means."""

    key: str
    unit: str
    meaning: str
    all: bool = False
    """Whether `<env>` may be `all`."""
    healthy: str = ""
    """Where it should be, and what to do where it is not; empty where nothing can be said of every run."""


QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
"""How a number is spread: by name, the last part of a metric's key."""
SAMPLED = "reward/all/mean"
"""The mean reward of a step's rollouts."""
HELD_OUT = "eval/*/avg@*"
"""Pattern of the held-out rewards, one for each env."""
REWARDS = (HELD_OUT, SAMPLED)
"""What runs are compared by where nothing else is asked for; without an evaluation the second is left."""


def held_out(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Those of a step's metrics that are held-out rewards."""
    return {key: value for key, value in metrics.items() if fnmatchcase(key, HELD_OUT)}
