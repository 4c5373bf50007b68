"""Intake of finished groups, before they compete for a place in a batch."""

import logging
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path

from prl.base.errors import NoSignal, PrlError
from prl.filters.base import apply_filters
from prl.orchestrator.batcher import MAX_EMPTY_BATCHES
from prl.orchestrator.metrics import by_env, count, mean, why_untrained
from prl.orchestrator.no_signal import mean_reward, what_to_look_at
from prl.orchestrator.state import IntakeState
from prl.orchestrator.types import Group, TrainEnv, attribute_errors_to, by_seat
from prl.rollouts.rewards import equal
from prl.rollouts.rollout import ERROR_KINDS, Outcome, Rollout, Stage

log = logging.getLogger(__name__)

WINDOW = 256
"""Latest rollouts of an env, over which the share of failed ones is taken."""
LEAST = 64
"""Rollouts of an env before its share of failed ones is looked at."""
NO_SIGNAL = ("", None)
"""The key, among those of warnings that were given, of the one that rollouts in a row were dropped."""


def extreme_of(means: list[float]) -> str | None:
    """Return `hard` where all mean rewards are 0, `easy` where all are 1, up to rounding; else None."""
    for kind, extreme in (("hard", 0.0), ("easy", 1.0)):
        if means and all(equal(reward, extreme) for reward in means):
            return kind
    return None


class Intake:
    """Counts what arrives, shows each finished group to its env's curriculum, and drops what online difficulty
    filtering or a `pre_batch` filter says.

    It ends the run if an env loses more than the share `max_error_share` of its latest rollouts. A failure while a
    frozen model was away is not counted against the env: that model has a deadline of its own.

    Invariant: every group that arrives is counted once, and shown to its curriculum if a rollout of it survived,
    whether it is admitted or not. The rollouts of a group that is not admitted are no longer active.
    """

    def __init__(self, envs: list[TrainEnv], max_error_share: float):
        self.envs = envs
        self.max_error_share = max_error_share
        self.arrived: list[Rollout] = []
        """Rollouts that no metrics line has counted."""
        self._judged: Counter[str] = Counter()
        """Groups of each env that its curriculum has seen and no metrics line has counted."""
        self._dropped_in_a_row: list[Rollout] = []
        """Survivors of the groups since the last one that took a place in a batch, each of a task that comes again."""
        self._recent: dict[str, deque[Outcome | None]] = {env.name: deque(maxlen=WINDOW) for env in envs}
        """The last rollouts of each env: the outcome of a failed one, else None."""
        self._warned: set[tuple[str, str | None]] = set()
        """Env and kind of failure of the warnings that were given."""

    def state_dict(self) -> IntakeState:
        """Return which rollouts, and how many groups, no metrics line has counted."""
        return IntakeState([rollout.trace.id for rollout in self.arrived], dict(self._judged))

    def load_state_dict(self, state: IntakeState, rollouts: Iterable[Rollout]) -> None:
        """Go on from an earlier part of the run, which had not counted some of its `rollouts`."""
        self._judged.update(state.judged)
        uncounted = set(state.arrived)
        self.arrived += [rollout for rollout in rollouts if rollout.trace.id in uncounted]

    def admit(self, group: Group) -> bool:
        """Count a group. Returns False if online difficulty filtering drops it: its survivors have left then.

        Otherwise the `pre_batch` filters are asked about its rollouts, and may leave none.
        All rollouts of the group learn the difficulty pool that their task is in from now on.
        """
        curriculum = group.env.curriculum
        survivors = group.survivors
        # Each side of a game by itself: their rewards may add up to the same in every episode.
        means = [mean(rollout.reward for rollout in seat) for seat in by_seat(survivors)]
        self.arrived += group.rollouts
        self._note_failures(group)
        self._judged[group.env.name] += bool(survivors)
        with group.env.asking():
            pool = curriculum.update(group.task, *means) if survivors else curriculum.pool_of(group.task)
            returns = curriculum.returns(group.task)
        if group.rollouts:  # else each came alone
            with group.env.asking():
                curriculum.observe(group.rollouts)
            with attribute_errors_to(group.env):
                group.env.algorithm.observe(group.rollouts)
        for rollout in group.rollouts:
            rollout.difficulty_pool = pool
        kind = extreme_of(means)
        dropped = curriculum.online_difficulty_filtering and kind is not None
        if dropped:
            for rollout in group.active:
                rollout.leave(Stage.DIFFICULTY, f"online difficulty filtering: mean reward {means[0]:g}", kind)
        else:
            apply_filters(group.env.filters, "pre_batch", group.rollouts)
        if group.active:
            self._dropped_in_a_row.clear()
            self._warned.discard(NO_SIGNAL)
        elif returns:  # of tasks that do not come again there is an end
            self._dropped_in_a_row += survivors
        return not dropped

    def _note_failures(self, group: Group) -> None:
        name = group.env.name
        ends = [rollout.outcome if rollout.failed else None for rollout in group.rollouts]
        failed = [end for end in ends if end is not None]
        for end in failed:
            if (name, end.source) not in self._warned:
                self._warned.add((name, end.source))
                log.warning("env %s: a rollout failed (%s; the first of its kind): %s", name, end.source, end.reason)
        # While a frozen model was away the failures say nothing of the env.
        if not (failed and group.excused):
            self._recent[name].extend(ends)

    def check(self, step: int, limit: int, run_dir: Path | None = None) -> None:
        """Raise PrlError if too many rollouts of an env failed, with the kinds and the last reason.

        Raise NoSignal if `limit` in a row were dropped before a batch, of tasks that are sampled again; of the number
        for one batch in a row, warn. `run_dir` has the metrics so far.
        """
        for name, recent in self._recent.items():
            failed = [end for end in recent if end is not None]
            if len(recent) >= LEAST and len(failed) > self.max_error_share * len(recent):
                kinds = Counter(end.source for end in failed).most_common()
                raise PrlError(
                    f"step {step}: {len(failed)} of the last {len(recent)} rollouts of env {name!r} failed, more than "
                    f"orchestrator.max_error_share={self.max_error_share:g} allows "
                    f"({', '.join(f'{kind}: {n}' for kind, n in kinds)}); the last because of {failed[-1].reason}"
                )
        dropped = len(self._dropped_in_a_row)
        if dropped * MAX_EMPTY_BATCHES < limit or (dropped < limit and NO_SIGNAL in self._warned):
            return
        self._warned.add(NO_SIGNAL)
        # The last one tells what drops them now.
        by_odf = self._dropped_in_a_row[-1].stage is Stage.DIFFICULTY
        message = (
            f"step {step}: {'online difficulty filtering' if by_odf else 'filters.pre_batch'} dropped {dropped} "
            f"rollouts in a row ({why_untrained(self._dropped_in_a_row)}). "
            f"{what_to_look_at(self._dropped_in_a_row, run_dir)}"
        )
        if dropped >= limit:
            raise NoSignal(message, mean_reward(self._dropped_in_a_row))
        log.warning("%s", message)

    def take(self) -> dict[str, float]:
        """Return metrics of what has arrived since the last call, trained or not, and of the pools as they are now."""
        evicted, pools = Counter[tuple[str, str]](), dict[str, dict[str, int]]()
        for env in self.envs:
            with env.asking():
                evicted.update({(env.name, pool): n for pool, n in env.curriculum.take_evicted().items()})
                pools |= {env.name: env.curriculum.counts()} if env.curriculum.pooled else {}
        arrived, judged = self.arrived, self._judged
        self.arrived, self._judged = [], Counter()
        line = {
            "tokens/generated": float(sum(rollout.num_completion_tokens for rollout in arrived)),
            "rollouts/arrived": float(len(arrived)),
            "rollouts/errored": float(count(arrived, Stage.FAILED)),
        }
        parts: dict[str, list[Rollout]] = {env.name: [] for env in self.envs} | by_env(arrived)
        rewards = {name: [rollout.reward for rollout in part if not rollout.failed] for name, part in parts.items()}
        kinds = {name: Counter(rollout.error_kind for rollout in part) for name, part in parts.items()}
        rewards["all"] = [reward for part in rewards.values() for reward in part]
        kinds["all"] = sum(kinds.values(), Counter())
        for name in rewards:
            line |= {f"errors/{name}/{kind}": float(kinds[name][kind]) for kind in ERROR_KINDS}
            if rewards[name]:
                line[f"reward/{name}/arrived"] = mean(rewards[name])
        for env in self.envs:
            name, counts = env.name, pools.get(env.name)
            if counts is not None:
                line |= {f"pool/{name}/{pool}": n / sum(counts.values()) for pool, n in counts.items()}
                for pool in ("easy", "hard"):
                    line[f"evicted_examples/{name}/{pool}"] = float(evicted[name, pool])
                    line[f"evicted_examples/{name}/{pool}_rate"] = evicted[name, pool] / max(1, judged[name])
            if env.curriculum.online_difficulty_filtering:
                ends = Counter(r.outcome.source for r in parts[name] if r.outcome and r.stage is Stage.DIFFICULTY)
                line |= {f"filtered_rollouts/{name}/{kind}": float(ends[kind]) for kind in ("easy", "hard")}
        return line
