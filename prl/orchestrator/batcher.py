"""Batches of finished groups."""

from collections.abc import Callable

from prl.orchestrator.types import Group
from prl.rollouts.outcome import Stage
from prl.rollouts.rollout import Rollout


class Batcher:
    """Holds finished groups until a batch is cut. Groups are never split.

    Invariant: every group that `add` accepts leaves once, by `cut`, `drop_stale` or `drop_surplus`. After
    `drop_stale(version, limit)` no batch holds a rollout that started more than `limit` versions before `version`;
    after `cut(last_chance)` no waiting group started from `last_chance` or before.
    """

    def __init__(self, batch_size: int | None, token_batch_size: int | None):
        size = token_batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("one of batch_size and token_batch_size must be a number")
        self.size = size
        """Rollouts of a batch, or tokens where `counts_tokens`."""
        self.counts_tokens = batch_size is None
        self.groups: list[Group] = []
        self.filtered_in_a_row = 0
        """Rollouts that filters dropped since the last group of which a rollout was left."""
        self._mean_tokens = 0.0

    def add(self, group: Group) -> bool:
        """Take a group in. Returns False, and does not keep it, if none of its rollouts is active."""
        tokens = [sum(len(s.token_ids) for s in rollout.samples) for rollout in group.survivors]
        if tokens:
            mean = sum(tokens) / len(tokens)
            self._mean_tokens = mean if not self._mean_tokens else 0.9 * self._mean_tokens + 0.1 * mean
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
        return max(group_size, round(self.size / self._mean_tokens)) if self._mean_tokens else group_size

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

    def drop_stale(self, version: int, limit: int) -> list[Rollout]:
        """Drop groups that started more than `limit` versions before `version`. Returns their rollouts."""
        return self._drop(
            lambda group: version - group.start_version > limit,
            Stage.STALE,
            lambda group: f"started from version {group.start_version}, now {version}",
        )

    def drop_surplus(self, last_chance: float) -> list[Rollout]:
        """Drop groups that started from version `last_chance` or before. Returns their rollouts."""
        return self._drop(
            lambda group: group.start_version <= last_chance,
            Stage.SURPLUS,
            lambda group: "the batch was full (orchestrator.oversampling_factor)",
        )

    def _drop(self, which: Callable[[Group], bool], stage: Stage, reason: Callable[[Group], str]) -> list[Rollout]:
        chosen = [group for group in self.groups if which(group)]
        self.groups = [group for group in self.groups if not which(group)]
        for group in chosen:
            for rollout in group.active:
                rollout.leave(stage, reason(group))
        return [rollout for group in chosen for rollout in group.rollouts]

    def _size(self, groups: list[Group]) -> int:
        if not self.counts_tokens:
            return sum(len(group.active) for group in groups)
        return sum(len(s.token_ids) for group in groups for rollout in group.active for s in rollout.samples)
