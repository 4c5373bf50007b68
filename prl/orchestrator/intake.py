"""What comes back from the engines, before a place in a batch is taken."""

from prl.errors import PrlError
from prl.orchestrator.metrics import mean
from prl.orchestrator.types import Group, TrainEnv, by_seat


class Intake:
    """Shows each finished group to its env's buffer, drops what online difficulty filtering drops, and counts it all."""

    def __init__(self, envs: list[TrainEnv]):
        self.buffers = {env.name: env.buffer for env in envs}
        self._filtered_in_a_row = {"easy": 0, "hard": 0}
        self._clear()

    def admit(self, group: Group) -> bool:
        """Whether the group may go on: False where online difficulty filtering drops it.

        Its rollouts then say so in `left_out`, and all of them learn the pool that their task is in from now on.
        """
        buffer = self.buffers[group.env_name]
        rewards = [rollout.reward for rollout in group.survivors]
        means = [mean(rollout.reward for rollout in seat) for seat in by_seat(group.survivors)]
        self._rollouts += len(group.rollouts)
        self._tokens += sum(rollout.num_completion_tokens for rollout in group.rollouts)
        if not rewards:
            pool = buffer.pool_of(group.task)
        else:
            self._rewards.setdefault(group.env_name, []).extend(rewards)
            pool = buffer.update(group.task, *means)
        for rollout in group.rollouts:
            rollout.pool = pool
        if not rewards:
            return True
        if not buffer.config.online_difficulty_filtering or set(means) not in ({0.0}, {1.0}):
            self._filtered_in_a_row = {"easy": 0, "hard": 0}
            return True
        kind = "hard" if means[0] == 0.0 else "easy"
        self._filtered[group.env_name][kind] += len(rewards)
        if (
            pool in (None, "normal") or buffer.config.refill
        ):  # else the task does not come again: it cannot go on for ever
            self._filtered_in_a_row[kind] += len(rewards)
        for rollout in group.survivors:
            rollout.left_out = f"online difficulty filtering: mean reward {means[0]:g}"
        return False

    def check(self, limit: int) -> None:
        """Raise PrlError if more rollouts in a row than `limit` were dropped, of tasks that come again and again."""
        easy, hard = self._filtered_in_a_row["easy"], self._filtered_in_a_row["hard"]
        if easy + hard >= limit:
            raise PrlError(
                f"online difficulty filtering dropped {easy + hard} rollouts in a row, {easy} in groups with a mean reward of 1 "
                f"and {hard} with one of 0: the tasks are too easy or too hard for this model, or group_size is 1"
            )

    def take(self) -> dict[str, float]:
        """Metrics of what has arrived since the last call, trained or not, and of the pools as they are."""
        line = {"tokens/generated": float(self._tokens), "rollouts/arrived": float(self._rollouts)}
        everything = [reward for rewards in self._rewards.values() for reward in rewards]
        for name, rewards in {"all": everything, **self._rewards}.items():
            if rewards:
                line[f"reward/{name}/arrived"] = mean(rewards)
        for name, buffer in self.buffers.items():
            if buffer.pooled:
                line |= {f"pool/{name}/{pool}": n / len(buffer.tasks) for pool, n in buffer.counts().items()}
                line |= {f"evicted_examples/{name}/{pool}": float(buffer.evicted[pool]) for pool in ("easy", "hard")}
                buffer.evicted.clear()
            if buffer.config.online_difficulty_filtering:
                line |= {f"filtered_rollouts/{name}/{kind}": float(n) for kind, n in self._filtered[name].items()}
        self._clear()
        return line

    def _clear(self) -> None:
        self._tokens = self._rollouts = 0
        self._rewards: dict[str, list[float]] = {}
        self._filtered = {name: {"easy": 0, "hard": 0} for name in self.buffers}
