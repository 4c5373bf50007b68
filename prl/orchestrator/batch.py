"""A cut batch: which of its rollouts are shipped, and whether that is worth a step."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from prl.errors import PrlError
from prl.orchestrator.filters.base import Filters, apply_filters
from prl.orchestrator.metrics import count, trains, why_untrained
from prl.orchestrator.types import Group
from prl.rollouts.outcome import Stage
from prl.rollouts.rollout import Rollout

log = logging.getLogger(__name__)

MAX_EMPTY_BATCHES = 10


@dataclass(frozen=True)
class Batch:
    """A cut batch, after the filters."""

    rollouts: list[Rollout]
    """All of its groups, each with an outcome."""
    to_ship: list[Rollout]
    """Those of them whose samples are shipped: trained and unlearnable ones."""

    @property
    def trained(self) -> int:
        """How many of them train."""
        return count(self.to_ship, Stage.TRAINED)

    @property
    def placed(self) -> list[Rollout]:
        """Those that had a place in the batch: `to_ship`, and what `post_batch` filters dropped."""
        return [rollout for rollout in self.rollouts if rollout.outcome is not None and rollout.outcome.stage.in_batch]


def decide(groups: list[Group], filters: Mapping[str, Filters], seq_len: int) -> Batch:
    """Apply the `post_batch` filters of each env to a cut batch, and give every other rollout its outcome.

    Args:
        groups: The cut batch.
        filters: By env.
        seq_len: Tokens of a sample that are shipped: what lies behind trains nothing.
    """
    for group in groups:
        apply_filters(filters[group.env_name], "post_batch", group.rollouts)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    batch = Batch(rollouts, [rollout for rollout in rollouts if rollout.is_active])
    for rollout in batch.to_ship:
        if trains(rollout, seq_len):
            rollout.leave(Stage.TRAINED)
        else:
            rollout.leave(Stage.UNLEARNABLE, "nothing of it within trainer.seq_len feeds a loss")
    return batch


class EmptyBatches:
    """Counts batches with nothing to train in a row. Invariant: at most `MAX_EMPTY_BATCHES` - 1 are passed over."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def add(self, step: int, batch: Batch) -> None:
        """Count a batch; warn if at most a tenth of it trains. Raises PrlError for one empty batch too many."""
        if batch.trained:
            self.in_a_row = 0
            if 10 * batch.trained <= len(batch.placed):
                why, size = why_untrained(batch.placed), len(batch.placed)
                log.warning("step %d: only %d of %d rollouts train: %s", step, batch.trained, size, why)
            return
        self.in_a_row += 1
        why, size = why_untrained(batch.rollouts), len(batch.rollouts)
        log.warning(
            "step %d: nothing to train in a batch of %d rollouts (%d in a row): %s", step, size, self.in_a_row, why
        )
        if self.in_a_row >= MAX_EMPTY_BATCHES:
            raise PrlError(
                f"step {step}: {self.in_a_row} batches in a row had nothing to train ({why}). "
                "If all rewards of a group are equal, the tasks are too easy or too hard for this model, "
                "or group_size is 1"
            )
