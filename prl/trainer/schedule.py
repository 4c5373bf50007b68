"""Learning rate over steps. No torch here: a config is composed with these classes."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le


class Schedule(ABC):
    """Scales the peak learning rate of every step. Extend it, as a dataclass whose fields are its knobs."""

    @abstractmethod
    def factor(self, step: int, max_steps: int) -> float:
        """Share of the peak learning rate in `step`, from 1 to `max_steps`."""


@dataclass(kw_only=True)
class WarmupDecay(Schedule):
    """Linear warm-up, a plateau if the decay leaves room for one, then a decay over the last part of the run."""

    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps below the peak at the start."""
    decay: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the decay."""
    decay_fraction: Annotated[float, Ge(0), Le(1)] = 1.0
    """Share of the run, at its end, that the decay takes."""
    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    """Final learning rate as a share of the peak."""

    def factor(self, step: int, max_steps: int) -> float:
        if step <= self.warmup_steps:
            return step / (self.warmup_steps + 1)
        decay_steps = round(max_steps * self.decay_fraction)
        into_decay = step - (max_steps - decay_steps)
        if self.decay == "constant" or into_decay <= 0 or decay_steps == 0:
            return 1.0
        progress = into_decay / decay_steps
        shape = 1 - progress if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_ratio + (1 - self.min_ratio) * shape
