"""Learning rate over steps. No torch here: a config is composed with these classes."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le


class Schedule(ABC):
    """Scales the peak learning rate of every step. Extend it, as a dataclass whose fields are its options."""

    @abstractmethod
    def factor(self, step: int, max_steps: int) -> float:
        """Return the share of the peak learning rate in `step`, from 1 to `max_steps`."""


@dataclass(kw_only=True)
class Constant(Schedule):
    """The peak learning rate, after a linear warm-up."""

    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps below the peak at the start."""

    def factor(self, step: int, max_steps: int) -> float:
        return step / (self.warmup_steps + 1) if step <= self.warmup_steps else 1.0


@dataclass(kw_only=True)
class Decay(Constant):
    """Linear warm-up, a plateau if the decay leaves room for one, then a decay over the last part of the run."""

    decay_fraction: Annotated[float, Ge(0), Le(1)] = 1.0
    """Share of the run, at its end, that the decay takes."""
    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    """Final learning rate as a share of the peak."""

    def factor(self, step: int, max_steps: int) -> float:
        decay_steps = round(max_steps * self.decay_fraction)
        into_decay = step - (max_steps - decay_steps)
        if step <= self.warmup_steps or into_decay <= 0:
            return super().factor(step, max_steps)
        return self.min_ratio + (1 - self.min_ratio) * self.shape(into_decay / decay_steps)

    @abstractmethod
    def shape(self, progress: float) -> float:
        """Return the course of the decay: from 1 at `progress` 0 to 0 at 1."""


@dataclass(kw_only=True)
class Linear(Decay):
    """A straight line down, after a linear warm-up and a plateau if the decay leaves room for one."""

    def shape(self, progress: float) -> float:
        return 1 - progress


@dataclass(kw_only=True)
class Cosine(Decay):
    """Half a cosine down, after a linear warm-up and a plateau if the decay leaves room for one."""

    def shape(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))
