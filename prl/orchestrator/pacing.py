"""Pacing: how many groups are under way, and when a batch is complete."""

from prl.inference.client import InferencePool
from prl.orchestrator.batcher import Batcher
from prl.orchestrator.config import OrchestratorConfig
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.types import TrainEnv


class Pacing:
    """The asynchronous rules. Holds no state of its own: it reads the stages, and starts groups.

    Invariant: at most `oversampling_factor` times the rollouts are under way that the steps take for which a rollout
    that starts now is young enough, except for a group that is larger than what is left, or started because a token
    batch was estimated too small.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        envs: list[TrainEnv],
        pool: InferencePool,
        dispatcher: Dispatcher,
        batcher: Batcher,
        max_steps: int,
    ):
        self.config = config
        self.envs = envs
        self.pool = pool
        self.dispatcher = dispatcher
        self.batcher = batcher
        self.max_steps = max_steps

    @property
    def oversamples(self) -> bool:
        """Whether more rollouts are under way than batches take."""
        return self.config.oversampling_factor > 1

    @property
    def batch_rollouts(self) -> int:
        """Rollouts that a batch takes."""
        return self.batcher.batch_rollouts(max(env.rollouts_per_group for env in self.envs))

    @property
    def under_way(self) -> int:
        """Rollouts in flight or waiting for a batch."""
        return self.dispatcher.rollouts_in_flight + self.batcher.rollouts

    def last_chance(self, step: int) -> int:
        """The oldest version whose rollouts may train in `step`, and in no later step."""
        return step - 1 - self.config.max_async_level

    def fill(self, shipped: int) -> bool:
        """Start groups as long as their rollouts can be trained on in time.

        A rollout that starts from version v may be trained on in steps up to v + 1 + max_async_level. As many batches,
        less those shipped, may be outstanding. Oversampling multiplies that.

        Args:
            shipped: The last step whose batch has been shipped.

        Returns:
            False if no group is in flight and none can start.
        """
        last_step = min(self.pool.version + 1 + self.config.max_async_level, self.max_steps)
        while True:
            allowed = self.config.oversampling_factor * (last_step - shipped) * self.batch_rollouts
            # With nothing in flight and no full batch, a token batch was estimated too small: one more group.
            going_on = self.dispatcher.in_flight or self.batcher.full() or last_step <= shipped
            if self.under_way >= allowed and going_on:
                return True
            if not self.dispatcher.start_group():
                return bool(self.dispatcher.in_flight)

    def complete(self, step: int) -> bool:
        """Whether the batch of `step` is full and no group is in flight that only this step may train on.

        Waiting for such groups keeps slow, long rollouts in the data instead of dropping them as too old. With
        oversampling there are more of them than a batch takes, and none is waited for.
        """
        if self.oversamples:
            return self.batcher.full()
        last_chance = self.last_chance(step)
        return self.batcher.full() and all(g.start_version > last_chance for g in self.dispatcher.in_flight.values())

    def out_of_tasks(self) -> bool:
        """Whether no group is in flight, and no env will ever start one again."""
        return not self.dispatcher.in_flight and all(env.buffer.ended for env in self.envs)
