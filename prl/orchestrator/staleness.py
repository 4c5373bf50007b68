"""The rule of policy versions: what a rollout is meant for that starts now, what a step waits for, what is too old.

Step n turns version n-1 into version n. k is `max_async_level`, the limit is `age_limit`, both in policy versions.

- k bounds how far sampling runs ahead: what starts from version v is meant for a step up to v+1+k, and no more starts
  than these steps take, times `oversampling_factor`.
- The limit bounds what trains: step n trains on nothing that started before version n-1-limit.
- A group that is in flight after the last step that it was meant for is a straggler. It no longer counts among what may
  be under way, so that others start in its stead, and is in the next batch once it has finished.

| | a full batch | what it leaves behind and no later step may train on |
|---|---|---|
| limit above k | does not wait | cancelled as too old (`off_policy/dropped`) |
| limit = k | waits for the groups that only its step may train on, so that there are no stragglers | nothing |
| limit = k, oversampling | does not wait, nor take more than its size | dropped as surplus (`rollouts/surplus`) |
"""

import math
from dataclasses import dataclass

from prl.config.orchestrator import OrchestratorConfig
from prl.rollouts.rollout import Stage


@dataclass(frozen=True)
class Dropped:
    """The end of groups that started from version `last_chance` or before; `{start}` in the reason is their version."""

    last_chance: float
    stage: Stage
    metric: str
    reason: str


ENDED_EARLY = Dropped(math.inf, Stage.SURPLUS, "rollouts/surplus", "the run ended early (orchestrator.stop)")

NONE_DROPPED = {"off_policy/dropped": 0.0, "off_policy/dropped_tokens": 0.0}
"""The metrics of a step after which nothing was too old."""


class Staleness:
    """The rule for the settings of a run."""

    def __init__(self, config: OrchestratorConfig, max_steps: int):
        self.k, self.limit, self.max_steps = config.max_async_level, config.age_limit, max_steps
        self.oversampling = config.oversampling_factor
        self.keeps_stragglers = self.limit > self.k
        """A rollout may train after the last step that it was meant for."""

    def steps_ahead(self, version: int, shipped: int) -> int:
        """Return the steps after `shipped` that a rollout from `version` is meant for; 0 or less if there is none."""
        return min(version + 1 + self.k, self.max_steps) - shipped

    def on_time(self, shipped: int) -> int:
        """Return the oldest version from which a rollout in flight is meant for a step after `shipped`."""
        return shipped - self.k

    def last_chance(self, step: int) -> int:
        """Return the version up to which groups are too old for any step after `step`."""
        return step - 1 - self.limit

    def awaited(self, step: int) -> float:
        """Return the version up to which a full batch of `step` waits for groups in flight."""
        # With oversampling others take the places of what is slow.
        waits = not self.keeps_stragglers and self.oversampling == 1
        return self.last_chance(step) if waits else -math.inf

    def included(self, step: int) -> float:
        """Return the version up to which the batch of `step` takes all finished groups, though it grows by them."""
        surplus = not self.keeps_stragglers and self.oversampling > 1
        return -math.inf if surplus else self.last_chance(step)

    def left_behind(self, step: int) -> Dropped:
        """Return the groups that are dropped when `step` has been shipped: no later step may train on them."""
        last = math.inf if step == self.max_steps else self.last_chance(step)
        if not self.keeps_stragglers and self.oversampling > 1:
            reason = "the batch was full (orchestrator.oversampling_factor)"
            return Dropped(last, Stage.SURPLUS, "rollouts/surplus", reason)
        if step == self.max_steps:
            return Dropped(last, Stage.SURPLUS, "rollouts/surplus", "the last batch was full")
        reason = f"started from version {{start}}, too old for step {step + 1}"
        return Dropped(last, Stage.STALE, "off_policy/dropped", reason)
