"""Batches of finished groups: they wait, a batch is cut, and its rollouts get their outcomes."""

import logging

from prl.errors import PrlError
from prl.orchestrator.filters.base import apply_filters
from prl.orchestrator.metrics import count, why_untrained
from prl.orchestrator.types import Group, attribute_errors_to
from prl.rollouts.rollout import IN_BATCH, Rollout, Stage
from prl.wire.components import COMPONENTS

log = logging.getLogger(__name__)

MAX_EMPTY_BATCHES = 10


class Batcher:
    """Holds finished groups until a batch is cut. Groups are never split.

    Invariants: every group that `add` accepts leaves once, by `cut` or `drop`. After `cut(last_chance)` or
    `drop(last_chance)` no waiting group started from version `last_chance` or before. At most `MAX_EMPTY_BATCHES` - 1
    batches in a row have nothing to train.
    """

    def __init__(self, batch_size: int | None, token_batch_size: int | None):
        self.size = batch_size or token_batch_size or 0
        """Rollouts of a batch, or tokens where `counts_tokens`: exactly one of the two is a number."""
        self.counts_tokens = batch_size is None
        self.groups: list[Group] = []
        self.filtered_in_a_row = 0
        """Rollouts that filters dropped since the last group of which a rollout was left."""
        self.empty_in_a_row = 0
        """Batches with nothing to train since the last one that was shipped."""
        self.mean_tokens = 0.0
        """Tokens of a rollout, lately; 0 before the first."""

    def add(self, group: Group) -> bool:
        """Take a group in. Returns False, and does not keep it, if none of its rollouts is active."""
        tokens = [sum(len(s.token_ids) for s in rollout.samples) for rollout in group.survivors]
        if tokens:
            mean = sum(tokens) / len(tokens)
            self.mean_tokens = mean if not self.mean_tokens else 0.9 * self.mean_tokens + 0.1 * mean
        if group.active:
            self.filtered_in_a_row = 0
            self.groups.append(group)
        else:
            self.filtered_in_a_row += len(tokens)
        return bool(group.active)

    @property
    def rollouts(self) -> int:
        """Rollouts waiting to be trained on."""
        return sum(len(group.active) for group in self.groups)

    def batch_rollouts(self, group_size: int) -> int:
        """Rollouts that a batch takes; for token batches an estimate from the rollouts seen so far."""
        if not self.counts_tokens:
            return self.size
        return max(group_size, round(self.size / self.mean_tokens)) if self.mean_tokens else group_size

    def full(self) -> bool:
        """Whether what waits is enough for a batch."""
        return self._size(self.groups) >= self.size

    def cut(self, last_chance: float) -> list[Group]:
        """Take the groups of the next batch: those that started from the oldest policy first, then in order of arrival.

        Groups that started from version `last_chance` or before are too old for any later batch. This one takes all of
        them, even if that makes it larger. It is smaller than a batch only if no more groups wait.
        """
        self.groups.sort(key=lambda group: group.start_version)
        batch: list[Group] = []
        while self.groups and (self._size(batch) < self.size or self.groups[0].start_version <= last_chance):
            batch.append(self.groups.pop(0))
        return batch

    def drop(self, last_chance: float, stage: Stage, reason: str) -> list[Rollout]:
        """Drop groups that started from version `last_chance` or before. Returns their rollouts.

        In the reason of each rollout `{start}` stands for the version that its group started from.
        """
        dropped = [group for group in self.groups if group.start_version <= last_chance]
        self.groups = [group for group in self.groups if group.start_version > last_chance]
        for group in dropped:
            for rollout in group.active:
                rollout.leave(stage, reason.format(start=group.start_version))
        return [rollout for group in dropped for rollout in group.rollouts]

    def check_filters(self, step: int, limit: int, left: list[Rollout]) -> None:
        """Raise PrlError if filters dropped `limit` rollouts in a row; `left` are the last that no batch holds."""
        if self.filtered_in_a_row >= limit:
            dropped = [rollout for rollout in left if rollout.stage is Stage.PRE_FILTERED]
            raise PrlError(
                f"step {step}: filters.pre_batch dropped {self.filtered_in_a_row} rollouts in a row "
                f"({why_untrained(dropped)}), enough for {MAX_EMPTY_BATCHES} batches"
            )

    def check_batch(self, step: int, rollouts: list[Rollout]) -> None:
        """Warn if at most a tenth of a cut batch trains. Raises PrlError for one empty batch too many."""
        if trained := count(rollouts, Stage.TRAINED):
            self.empty_in_a_row = 0
            placed = [rollout for rollout in rollouts if rollout.stage in IN_BATCH]
            if 10 * trained <= len(placed):
                log.warning(
                    "step %d: only %d of %d rollouts train: %s", step, trained, len(placed), why_untrained(placed)
                )
            return
        self.empty_in_a_row += 1
        why = why_untrained(rollouts)
        log.warning(
            "step %d: nothing to train in a batch of %d rollouts (%d in a row): %s",
            step,
            len(rollouts),
            self.empty_in_a_row,
            why,
        )
        if self.empty_in_a_row >= MAX_EMPTY_BATCHES:
            raise PrlError(
                f"step {step}: {self.empty_in_a_row} batches in a row had nothing to train ({why}). "
                "If all rewards of a group are equal, the tasks are too easy or too hard for this model, "
                "or group_size is 1"
            )

    def _size(self, groups: list[Group]) -> int:
        active = [rollout for group in groups for rollout in group.active]
        if not self.counts_tokens:
            return len(active)
        return sum(len(s.token_ids) for rollout in active for s in rollout.samples)


def decide(groups: list[Group], seq_len: int) -> list[Rollout]:
    """Apply the `post_batch` filters of each env to a cut batch, and give every other rollout its outcome.

    Args:
        groups: The cut batch.
        seq_len: Tokens of a sample that are shipped: what lies behind trains nothing.

    Returns:
        The rollouts whose samples are shipped: trained and unlearnable ones.
    """
    for group in groups:
        apply_filters(group.env.filters, "post_batch", group.rollouts)
    shipped = [rollout for group in groups for rollout in group.active]
    for rollout in shipped:
        if trains(rollout, seq_len):
            rollout.leave(Stage.TRAINED)
        else:
            rollout.leave(Stage.UNLEARNABLE, "nothing of it within trainer.seq_len feeds a loss")
    if count(shipped, Stage.TRAINED):
        show_algorithms(groups)
    return shipped


def show_algorithms(groups: list[Group]) -> None:
    """Show the algorithm of each env the rollouts of a batch that are the env's."""
    for env in {group.env.name: group.env for group in groups}.values():
        with attribute_errors_to(env):
            env.algorithm.observe_batch([r for group in groups if group.env is env for r in group.survivors])


def trains(rollout: Rollout, seq_len: int) -> bool:
    """Whether a token of its samples feeds a loss component, of the first `seq_len` tokens, which are shipped."""
    return any(sample.feeds(component, seq_len) for sample in rollout.samples for component in COMPONENTS.values())
