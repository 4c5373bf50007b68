"""Finished groups on one side, batches on the other."""

from prl.orchestrator.dispatcher import Group
from prl.rollouts.rollout import Rollout


class Sink:
    """Holds finished groups until a batch is cut. Groups are never split."""

    def __init__(self, batch_size: int | None, token_batch_size: int | None):
        self.batch_size = batch_size
        self.token_batch_size = token_batch_size
        self.groups: list[Group] = []
        self.discarded: list[Rollout] = []
        """Rollouts that no batch will hold; recorded with the next step."""
        self.failed_in_a_row = 0
        """Groups without a survivor since the last that had one."""
        self._mean_tokens = 0.0

    def add(self, group: Group) -> None:
        tokens = [sum(len(s.token_ids) for s in rollout.samples) for rollout in group.survivors]
        self.failed_in_a_row = 0 if tokens else self.failed_in_a_row + (not group.excused)
        if not tokens:
            self.discarded += group.rollouts
            return
        mean = sum(tokens) / len(tokens)
        self._mean_tokens = mean if not self._mean_tokens else 0.9 * self._mean_tokens + 0.1 * mean
        self.groups.append(group)

    @property
    def rollouts(self) -> int:
        """Rollouts waiting to be trained on."""
        return sum(len(group.survivors) for group in self.groups)

    def batch_rollouts(self, group_size: int) -> int:
        """Rollouts a batch takes; for token batches an estimate from the rollouts seen so far."""
        if self.batch_size is not None:
            return self.batch_size
        return max(group_size, round(self.token_batch_size / self._mean_tokens)) if self._mean_tokens else group_size

    def full(self) -> bool:
        """Whether what waits is enough for a batch."""
        return self._size(self.groups) >= (self.batch_size or self.token_batch_size)

    def cut(self, last_chance: int) -> list[Group]:
        """The groups of the next batch: those that started from the oldest policy first, then in order of arrival.

        What started from version `last_chance` or before is too old for any later batch, so this one takes all of it,
        even where that makes it larger.
        """
        self.groups.sort(key=lambda group: group.start_version)
        batch: list[Group] = []
        while self._size(batch) < (self.batch_size or self.token_batch_size) or (
            self.groups and self.groups[0].start_version <= last_chance
        ):
            batch.append(self.groups.pop(0))
        return batch

    def drop_stale(self, version: int, max_off_policy_steps: int) -> int:
        """Discard groups that have waited through too many policy updates. Returns how many rollouts that was."""
        stale = [group for group in self.groups if version - group.start_version > max_off_policy_steps]
        self.groups = [group for group in self.groups if group not in stale]
        for group in stale:
            for rollout in group.rollouts:
                rollout.error = rollout.error or f"stale: started from version {group.start_version}, now {version}"
            self.discarded += group.rollouts
        return sum(len(group.rollouts) for group in stale)

    def _size(self, groups: list[Group]) -> int:
        if self.batch_size is not None:
            return sum(len(group.survivors) for group in groups)
        return sum(len(s.token_ids) for group in groups for rollout in group.survivors for s in rollout.samples)
