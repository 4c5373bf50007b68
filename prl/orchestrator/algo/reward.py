"""The raw reward."""

from dataclasses import dataclass

from prl.orchestrator.algo.base import Algorithm
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class RewardAlgorithm(Algorithm):
    """Policy gradient on the reward itself, without a baseline. Source: REINFORCE (Williams, 1992)."""

    async def score_rollout(self, rollout: Rollout) -> None:
        rollout.assign_advantages(rollout.reward)
