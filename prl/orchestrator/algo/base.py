"""What every algorithm is: three hooks to override, and the two drivers that the pipeline calls."""

import inspect
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from prl.inference.client import InferencePool
    from prl.rollouts.rollout import Rollout

LossType = Literal["rl", "ce", "ref_kl"]


class Algorithm:
    """Decides the training signal of each token of a rollout.

    Subclass it, set `action_loss_type` to the loss component that sampled tokens feed, and override the hook whose
    moment fits the signal. `policy_pool` generates with the live policy and scores under it.
    """

    action_loss_type: ClassVar[LossType] = "rl"

    def __init__(self, config: Any, *, policy_pool: "InferencePool"):
        self.config = config
        self.policy_pool = policy_pool

    async def setup(self) -> None:
        """Connect what the algorithm's own config declares. Called once, before the first rollout."""

    async def score_rollout(self, rollout: "Rollout") -> None:
        """One rollout on arrival, before its group is complete: rollout-local credit, and any model call."""

    def score_group(self, group: list["Rollout"]) -> None | Awaitable[None]:
        """All rollouts of one task that did not fail, before filters: group-relative credit. May be async."""

    async def finalize_rollout(self, rollout: "Rollout") -> None:
        """Driver, not a hook: called by the pipeline as a rollout arrives. Errored rollouts skip the hooks."""
        if rollout.error is None:
            await self.score_rollout(rollout)

    async def finalize_group(self, rollouts: list["Rollout"]) -> None:
        """Driver, not a hook: scores the survivors and stamps their streams; after this a rollout is frozen."""
        survivors = [rollout for rollout in rollouts if rollout.error is None]
        if not survivors:
            return
        scored = self.score_group(survivors)
        if inspect.isawaitable(scored):
            await scored
        for rollout in survivors:
            self._stamp(rollout)

    def _stamp(self, rollout: "Rollout") -> None:
        """Write the advantage stream and the component weights onto the rollout's samples.

        Tokens that feed `rl` need no weight stream: an absent one means 1.0 on the mask.
        """
        start = 0
        for sample in rollout.samples:
            end = start + len(sample.token_ids)
            if rollout.advantages is not None:
                sample.advantages = rollout.advantages[start:end]
            if self.action_loss_type != "rl":
                sample.rl_weights = [0.0] * len(sample.token_ids)
                setattr(sample, f"{self.action_loss_type}_weights", [float(trains) for trains in sample.mask])
            start = end
