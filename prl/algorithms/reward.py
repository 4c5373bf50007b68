"""The raw reward as the advantage."""

from dataclasses import dataclass

from prl.algorithms.kl import KLPenalty
from prl.algorithms.length_penalty import LengthPenalty
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class RewardAlgorithm(LengthPenalty, KLPenalty):
    """Policy gradient on the reward itself, without a baseline. Source: REINFORCE (Williams, 1992)."""

    @property
    def waits_for_group(self) -> bool:
        return self.length_penalty is not None  # it compares the rollouts of a group

    async def score_rollout(self, rollout: Rollout) -> None:
        rollout.assign_advantages(rollout.reward)

    def score_group(self, group: list[Rollout]) -> None:
        if self.length_penalty is not None:
            for rollout, reward in zip(group, self.shaped_rewards(group), strict=True):
                rollout.assign_advantages(reward)
