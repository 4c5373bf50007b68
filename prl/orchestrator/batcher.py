"""Batches of finished groups: they wait, a batch is cut, and its rollouts get their outcomes."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prl.base.errors import NoSignal
from prl.filters.base import apply_filters
from prl.orchestrator.metrics import count, why_untrained
from prl.orchestrator.no_signal import mean_reward, what_to_look_at
from prl.orchestrator.state import BatcherState, all_restored, saved_group
from prl.orchestrator.types import Group, TrainEnv, attribute_errors_to
from prl.rollouts.components import COMPONENTS
from prl.rollouts.rollout import IN_BATCH, Rollout, Stage

log = logging.getLogger(__name__)

MAX_EMPTY_BATCHES = 10
"""Batches in a row with nothing to train, after which a run ends."""
MIX_MARGIN = 0.15
"""Share of a batch that an env may have above its share by weight, while groups of other envs are in flight for it."""


class Batcher:
    """Holds finished groups until a batch is cut. Groups are never split.

    Invariants: every group that `add` accepts leaves once, by `cut` or `drop`. After `cut(last_chance)` or
    `drop(last_chance)` no waiting group started from version `last_chance` or before. At most `MAX_EMPTY_BATCHES` - 1
    batches in a row have nothing to train.

    Args:
        batch_size: Rollouts of a batch.
        token_batch_size: Tokens of a batch; exactly one of the two is a number.
        mixed_envs: The envs that a batch mixes by weight; empty = it takes what comes first.
    """

    def __init__(self, batch_size: int | None, token_batch_size: int | None, mixed_envs: Sequence[TrainEnv] = ()):
        self.mixed_envs = mixed_envs
        self.size = batch_size or token_batch_size or 0
        """Rollouts of a batch, or tokens where `counts_tokens`."""
        self.counts_tokens = batch_size is None
        self.groups: list[Group] = []
        self.empty_in_a_row = 0
        """Batches with nothing to train since the last one that was shipped."""
        self.mean_tokens = 0.0
        """Tokens of a rollout, lately; 0 before the first."""

    def state_dict(self) -> BatcherState:
        """Return the groups that wait, as they are now."""
        return BatcherState([saved_group(group) for group in self.groups], self.mean_tokens)

    def load_state_dict(self, state: BatcherState, envs: Mapping[str, TrainEnv]) -> None:
        """Have the groups of an earlier part of the run wait again."""
        self.groups += all_restored(state.groups, envs)
        self.mean_tokens = state.mean_tokens

    def add(self, group: Group) -> bool:
        """Take a group in. Returns False, and does not keep it, if none of its rollouts is active."""
        tokens = [sum(len(s.token_ids) for s in rollout.samples) for rollout in group.survivors]
        if tokens:
            mean = sum(tokens) / len(tokens)
            # A moving mean: the length of replies changes in the course of a run.
            self.mean_tokens = mean if not self.mean_tokens else 0.9 * self.mean_tokens + 0.1 * mean
        if group.active:
            self.groups.append(group)
        return bool(group.active)

    def begin(self, size: int) -> None:
        """Begin a batch of so many new rollouts, or tokens where `counts_tokens`; others are replayed."""
        self.size = size

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
        """Return whether what waits is enough for a batch."""
        return self._size(self.groups) >= self.size

    def waits_for(self, coming: set[str], last_chance: float) -> set[str]:
        """Return the envs that a full batch waits for, of those with groups in flight for it (`coming`).

        None once the batch is full with each env within its limit, or once no env that has room left is coming.
        """
        batch, without_room = self._within_limits(last_chance)
        return coming - without_room if batch and self._size(batch) < self.size else set()

    def cut(self, last_chance: float) -> list[Group]:
        """Take the groups of the next batch: those that started from the oldest policy first, then in order of arrival.

        Groups that started from version `last_chance` or before are too old for any later batch. This one takes all of
        them, even if that makes it larger. It is smaller than a batch only if no more groups wait. What is above the
        limit of its env is taken last.
        """
        batch, _ = self._within_limits(last_chance)
        taken = set(batch)
        # The sort is stable: groups of one version stay in the order of their arrival.
        self.groups = sorted((g for g in self.groups if g not in taken), key=lambda group: group.start_version)
        while self.groups and (self._size(batch) < self.size or self.groups[0].start_version <= last_chance):
            batch.append(self.groups.pop(0))
        return batch

    def _within_limits(self, last_chance: float) -> tuple[list[Group], set[str]]:
        """Return the groups of the next batch within the limits of their envs, and the envs with no room for another.

        Of each env one group always has room, and so has what is too old for any later batch. Without a mix none.
        """
        shares = self._shares()
        # No limit for an env that is nearly alone: the margin would reach beyond the whole batch.
        limits = {env: (share + MIX_MARGIN) * self.size for env, share in shares.items() if share < 1 - MIX_MARGIN}
        batch: list[Group] = []
        sizes, counts, without_room = Counter[str](), Counter[str](), set[str]()
        for group in self._in_turn(shares):
            env, size, is_last = group.env.name, self._size([group]), group.start_version <= last_chance
            if sizes.total() >= self.size and not is_last:
                break
            if is_last or not counts[env] or sizes[env] + size <= limits.get(env, math.inf):
                batch.append(group)
                sizes[env] += size
                counts[env] += 1
            else:
                without_room.add(env)
        # An env has no room either for a group of the mean size of those that it has in the batch.
        of_mean_size = {env for env in counts if sizes[env] * (1 + 1 / counts[env]) > limits.get(env, math.inf)}
        return batch, without_room | of_mean_size

    def _shares(self) -> dict[str, float]:
        """Return the share of each env by weight, of those that have not ended or still wait; {} without a mix."""
        waiting = {group.env.name for group in self.groups if self.mixed_envs}
        envs = [env for env in self.mixed_envs if env.name in waiting or not env.ended]
        total = sum(env.weight for env in envs)
        return {env.name: env.weight / total for env in envs if len(envs) > 1}

    def _in_turn(self, shares: dict[str, float]) -> list[Group]:
        """Return the waiting groups, oldest policy first; of one policy the envs take turns by their shares."""
        sizes = Counter[tuple[str, float]]()
        turns = dict[Group, tuple[float, float]]()
        for group in self.groups if shares else ():
            env, version = group.env.name, group.start_version
            # The env that has the least of its share so far is next.
            turns[group] = version, sizes[env, version] / shares[env]
            sizes[env, version] += self._size([group])
        return sorted(turns, key=lambda group: turns[group])

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

    def check_batch(self, step: int, rollouts: list[Rollout], run_dir: Path | None = None) -> None:
        """Warn if at most a tenth of a cut batch trains. Raises NoSignal for one empty batch too many.

        `run_dir` has the metrics so far, which say whether there was a signal before.
        """
        if trained := count(rollouts, Stage.TRAINED):
            self.empty_in_a_row = 0
            placed = [rollout for rollout in rollouts if rollout.stage in IN_BATCH]
            if 10 * trained <= len(placed):
                log.warning(
                    "step %d: only %d of %d rollouts train: %s", step, trained, len(placed), why_untrained(placed)
                )
            return
        self.empty_in_a_row += 1
        why, look = why_untrained(rollouts), what_to_look_at(rollouts, run_dir)
        message = (
            f"step {step}: nothing to train in a batch of {len(rollouts)} rollouts ({self.empty_in_a_row} in a row)"
        )
        # The advice has a reply in it: once is enough.
        log.warning("%s: %s%s", message, why, f". {look}" if self.empty_in_a_row == 1 else "")
        if self.empty_in_a_row >= MAX_EMPTY_BATCHES:
            message = f"step {step}: {self.empty_in_a_row} batches in a row had nothing to train ({why}). {look}"
            raise NoSignal(message, mean_reward(rollouts))

    def size_of(self, rollouts: list[Rollout]) -> int:
        """Return how much of a batch these rollouts are: their number, or that of their tokens."""
        if not self.counts_tokens:
            return len(rollouts)
        return sum(len(s.token_ids) for rollout in rollouts for s in rollout.samples)

    def _size(self, groups: list[Group]) -> int:
        return self.size_of([rollout for group in groups for rollout in group.active])


def decide(groups: list[Group], seq_len: int) -> list[Rollout]:
    """Credit a cut batch, apply the `post_batch` filters of each env to it, and give each rollout its outcome.

    Args:
        groups: The cut batch.
        seq_len: Tokens of a sample that are shipped: what lies behind trains nothing.

    Returns:
        The rollouts whose samples are shipped: trained and unlearnable ones.
    """
    for env, own in of_each_env(groups):
        with attribute_errors_to(env):
            env.algorithm.finalize_batch([group.active for group in own if group.active])
    for group in groups:
        apply_filters(group.env.filters, "post_batch", group.rollouts)
    shipped = [rollout for group in groups for rollout in group.active]
    for rollout in shipped:
        if trains(rollout, seq_len):
            rollout.leave(Stage.TRAINED)
        else:
            rollout.leave(Stage.UNLEARNABLE, "nothing of it within trainer.seq_len feeds a loss")
    # A batch that trains nothing is not shipped: an algorithm that remembers batches must not see it.
    for env, own in of_each_env(groups) if count(shipped, Stage.TRAINED) else ():
        with attribute_errors_to(env):
            env.algorithm.observe_batch([rollout for group in own for rollout in group.survivors])
    return shipped


def of_each_env(groups: list[Group]) -> Iterator[tuple[TrainEnv, list[Group]]]:
    """Yield each env of a batch with its groups."""
    for env in {group.env.name: group.env for group in groups}.values():
        yield env, [group for group in groups if group.env is env]


def trains(rollout: Rollout, seq_len: int) -> bool:
    """Return whether a token of a rollout feeds a loss component. Of each sample `seq_len` tokens are shipped."""
    return any(sample.feeds(component, seq_len) for sample in rollout.samples for component in COMPONENTS.values())
