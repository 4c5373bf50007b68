"""The orchestrator's report on a step: what has happened since the last shipped batch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from prl.orchestrator.batch import Batch
from prl.orchestrator.filters.base import Filters
from prl.orchestrator.metrics import of_batch, of_filters, stage_of
from prl.rollouts.outcome import Stage
from prl.rollouts.rollout import Rollout


@dataclass
class StepReport:
    """Adds up what belongs to the next metrics line.

    Invariant: a rollout counts in one line. Batches with nothing to train are reported with the next shipped one.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    """Rollouts of the batches that were cut, and those that filters dropped before."""
    times: Counter[str] = field(default_factory=Counter)
    """Seconds by metric."""
    stale: int = 0
    """Rollouts dropped as too old, in flight or waiting."""
    surplus: int = 0
    """Rollouts dropped because the batch was full, in flight or waiting."""

    def add(self, batch: Batch, left_before: list[Rollout]) -> None:
        """Count a batch, and of the rollouts that left before it those that filters dropped."""
        self.rollouts += batch.rollouts
        self.rollouts += [rollout for rollout in left_before if stage_of(rollout) is Stage.PRE_FILTERED]

    def line(self, step: int, filters: Mapping[str, Filters], *, oversamples: bool) -> dict[str, float]:
        """The metrics of `step`; `filters` are those of each env."""
        line = of_batch(self.rollouts, step) | of_filters(self.rollouts, filters) | self.times
        line["off_policy/dropped"] = float(self.stale)
        if oversamples:
            line["rollouts/surplus"] = float(self.surplus)
        return line
