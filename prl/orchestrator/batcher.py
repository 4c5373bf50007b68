"""Finished groups on one side, batches on the other."""

from collections.abc import Callable

from prl.orchestrator.types import Group
from prl.rollouts.rollout import Rollout


class Batcher:
    """Holds finished groups until a batch is cut. Groups are never split."""

    def __init__(self, batch_size: int | None, token_batch_size: int | None):
        self.batch_size = batch_size
        self.token_batch_size = token_batch_size
        self.groups: list[Group] = []
        self.discarded: list[Rollout] = []
        """Rollouts that no batch will hold; recorded with the next step."""
        self.filtered_in_a_row = 0
        """Rollouts that a filter dropped since the last group of which it left something."""
        self._mean_tokens = 0.0

    def add(self, group: Group) -> None:
        tokens = [sum(len(s.token_ids) for s in rollout.samples) for rollout in group.survivors]
        if tokens:
            mean = sum(tokens) / len(tokens)
            self._mean_tokens = mean if not self._mean_tokens else 0.9 * self._mean_tokens + 0.1 * mean
        self.filtered_in_a_row = 0 if group.for_batch else self.filtered_in_a_row + len(tokens)
        if group.for_batch:
            self.groups.append(group)
        else:
            self.discarded += group.rollouts

    @property
    def rollouts(self) -> int:
        """Rollouts waiting to be trained on."""
        return sum(len(group.for_batch) for group in self.groups)

    def batch_rollouts(self, group_size: int) -> int:
        """Rollouts a batch takes; for token batches an estimate from the rollouts seen so far."""
        if self.batch_size is not None:
            return self.batch_size
        return max(group_size, round(self.token_batch_size / self._mean_tokens)) if self._mean_tokens else group_size

    def full(self) -> bool:
        """Whether what waits is enough for a batch."""
        return self._size(self.groups) >= (self.batch_size or self.token_batch_size)

    def cut(self, last_chance: float) -> list[Group]:
        """The groups of the next batch: those that started from the oldest policy first, then in order of arrival.

        What started from version `last_chance` or before is too old for any later batch, so this one takes all of it,
        even where that makes it larger. Smaller than a batch only where no more waits.
        """
        self.groups.sort(key=lambda group: group.start_version)
        batch: list[Group] = []
        while self.groups and (
            self._size(batch) < (self.batch_size or self.token_batch_size)
            or self.groups[0].start_version <= last_chance
        ):
            batch.append(self.groups.pop(0))
        return batch

    def drop_stale(self, version: int, max_off_policy_steps: int) -> int:
        """Discard groups that have waited through too many policy updates. Returns how many rollouts that was."""
        return self._discard(
            lambda group: version - group.start_version > max_off_policy_steps,
            lambda group: f"stale: started from version {group.start_version}, now {version}",
        )

    def drop_surplus(self, last_chance: float) -> int:
        """Discard groups that started from version `last_chance` or before. Returns how many rollouts that was."""
        return self._discard(
            lambda group: group.start_version <= last_chance,
            lambda group: "surplus: the batch was full (buffer.oversampling_factor)",
        )

    def _discard(self, which: Callable[[Group], bool], why: Callable[[Group], str]) -> int:
        chosen = [group for group in self.groups if which(group)]
        self.groups = [group for group in self.groups if group not in chosen]
        places = 0
        for group in chosen:
            for rollout in group.for_batch:
                rollout.left_out = why(group)
                places += 1
            self.discarded += group.rollouts
        return places

    def _size(self, groups: list[Group]) -> int:
        if self.batch_size is not None:
            return sum(len(group.for_batch) for group in groups)
        return sum(len(s.token_ids) for group in groups for rollout in group.for_batch for s in rollout.samples)
