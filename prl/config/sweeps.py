"""Config nodes of what the jobs of a sweep have in common."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge


@dataclass
class OptimizedMetricConfig:
    """The number of a run that a sweep compares its jobs by, and a sweeper optimises."""

    key: str | None = None
    """Name of the metric; `*` stands for anything, and what matches is averaged. null = the held-out reward,
    `eval/*/avg@*`, or in a run without evaluation `reward/all/mean`."""
    last: Annotated[int, Ge(1)] = 2
    """How many of the last steps that have the metric are averaged."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """What is better."""


@dataclass
class SweepConfig:
    """What the jobs of a sweep have in common."""

    share_engine: bool = False
    """Keep engines warm for the next job of the same process that has the same model and settings of them."""
