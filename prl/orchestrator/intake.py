"""Intake of finished groups, before they compete for a place in a batch."""

from prl.errors import PrlError
from prl.orchestrator.metrics import mean
from prl.orchestrator.types import Group, TrainEnv, by_seat
from prl.rollouts.outcome import Stage


class Intake:
    """Shows each finished group to its env's buffer, applies online difficulty filtering, and counts what arrives.

    Invariant: every group that arrives is counted once, and shown to its buffer if a rollout of it survived, whether it
    is admitted or not. The rollouts of a group that is not admitted are no longer active.
    """

    def __init__(self, envs: list[TrainEnv]):
        self.buffers = {env.name: env.buffer for env in envs}
        self._dropped_in_a_row = {"easy": 0, "hard": 0}
        self._clear()

    def admit(self, group: Group) -> bool:
        """Count a group. Returns False if online difficulty filtering drops it: its survivors have left then.

        All rollouts of the group learn the difficulty pool that their task is in from now on.
        """
        buffer = self.buffers[group.env_name]
        rewards = [rollout.reward for rollout in group.survivors]
        means = [mean(rollout.reward for rollout in seat) for seat in by_seat(group.survivors)]
        self._rollouts += len(group.rollouts)
        self._tokens += sum(rollout.num_completion_tokens for rollout in group.rollouts)
        self._rewards.setdefault(group.env_name, []).extend(rewards)
        pool = buffer.update(group.task, *means) if rewards else buffer.pool_of(group.task)
        for rollout in group.rollouts:
            rollout.difficulty_pool = pool
        if not rewards:
            return True
        if not buffer.online_difficulty_filtering or set(means) not in ({0.0}, {1.0}):
            self._dropped_in_a_row = {"easy": 0, "hard": 0}
            return True
        kind = "hard" if means[0] == 0.0 else "easy"
        self._dropped[group.env_name][kind] += len(rewards)
        if buffer.returns(group.task):  # of tasks that do not come again there is an end
            self._dropped_in_a_row[kind] += len(rewards)
        for rollout in group.active:
            rollout.leave(Stage.DIFFICULTY, f"online difficulty filtering: mean reward {means[0]:g}", kind)
        return False

    def check(self, limit: int) -> None:
        """Raise PrlError if `limit` rollouts in a row were dropped, of tasks that are sampled again."""
        easy, hard = self._dropped_in_a_row["easy"], self._dropped_in_a_row["hard"]
        if easy + hard >= limit:
            raise PrlError(
                f"online difficulty filtering dropped {easy + hard} rollouts in a row, {easy} in groups with a mean "
                f"reward of 1 and {hard} with one of 0: the tasks are too easy or too hard for this model, or "
                "group_size is 1"
            )

    def take(self) -> dict[str, float]:
        """Metrics of what has arrived since the last call, trained or not, and of the pools as they are now."""
        line = {"tokens/generated": float(self._tokens), "rollouts/arrived": float(self._rollouts)}
        everything = [reward for rewards in self._rewards.values() for reward in rewards]
        for name, rewards in {"all": everything, **self._rewards}.items():
            if rewards:
                line[f"reward/{name}/arrived"] = mean(rewards)
        for name, buffer in self.buffers.items():
            if buffer.pooled:
                counts, evicted = buffer.counts(), buffer.take_evicted()
                line |= {f"pool/{name}/{pool}": n / sum(counts.values()) for pool, n in counts.items()}
                line |= {f"evicted_examples/{name}/{pool}": float(evicted[pool]) for pool in ("easy", "hard")}
            if buffer.online_difficulty_filtering:
                line |= {f"filtered_rollouts/{name}/{kind}": float(n) for kind, n in self._dropped[name].items()}
        self._clear()
        return line

    def _clear(self) -> None:
        self._tokens = self._rollouts = 0
        self._rewards: dict[str, list[float]] = {}
        self._dropped = {name: {"easy": 0, "hard": 0} for name in self.buffers}
