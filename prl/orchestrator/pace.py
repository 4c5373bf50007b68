"""How many groups are under way, as many as the steps ahead need, and of which envs a batch waits for more."""

from prl.orchestrator.batcher import Batcher
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.staleness import Staleness
from prl.orchestrator.weight_sync import WeightSync


class Pace:
    """Starts groups as long as the steps that they are meant for need them. Stragglers count once they finish."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        batcher: Batcher,
        weight_sync: WeightSync,
        staleness: Staleness,
        oversampling_factor: float,
    ):
        self.dispatcher = dispatcher
        self.batcher = batcher
        self.weight_sync = weight_sync
        self.staleness = staleness
        self.oversampling_factor = oversampling_factor

    def fill(self) -> bool:
        """Start what is missing. Returns False if no group is in flight and none can start."""
        steps, batch = self.steps_ahead, self.batcher.batch_rollouts(self.dispatcher.largest_group)
        on_time = self.rollouts_on_time  # looked up once: a step may be thousands of groups
        while True:
            under_way = on_time + self.batcher.rollouts
            # With nothing to come and no full batch, a token batch was estimated too small: one more group.
            going_on = on_time or self.batcher.full() or steps <= 0
            if under_way >= self.oversampling_factor * steps * batch and going_on:
                return True
            if not (started := self.dispatcher.start_group()):
                return bool(self.dispatcher.in_flight)
            on_time += started

    def missing_envs(self, step: int) -> set[str]:
        """The envs of which the full batch of `step` waits for more: not for stragglers, nor while a model is away.

        Groups that may start now, and are not for this batch alone, are started first: it may wait for them, too.
        """
        if self.steps_ahead > 1 and not self.weight_sync.busy:
            self.fill()
        on_time = self.staleness.on_time(step - 1)
        in_flight = {group.env.name for group in self.dispatcher.in_flight if group.start_version >= on_time}
        coming = {env.name for env in self.dispatcher.envs if env.name in in_flight and env.up}
        return self.batcher.waits_for(coming, self.staleness.included(step))

    @property
    def rollouts_on_time(self) -> int:
        """Rollouts in flight that are meant for a step not shipped yet: all but those of stragglers."""
        return self.dispatcher.rollouts_since(self.staleness.on_time(self.weight_sync.shipped))

    @property
    def steps_ahead(self) -> int:
        """Steps that a rollout which starts now is meant for, less those shipped."""
        return self.staleness.steps_ahead(self.weight_sync.pool.version, self.weight_sync.shipped)
