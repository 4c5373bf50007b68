"""The raw reward."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prl.inference.sampling import SamplingConfig
from prl.orchestrator.algo.base import Algorithm

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


@dataclass
class RewardConfig:
    """Policy gradient on the reward itself."""

    _target_: str = "prl.orchestrator.algo.reward.RewardAlgorithm"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How rollouts are sampled."""


class RewardAlgorithm(Algorithm):
    """Credit of every sampled token: the rollout's reward, without a baseline. Source: REINFORCE (Williams, 1992)."""

    async def score_rollout(self, rollout: "Rollout") -> None:
        rollout.assign_advantages(rollout.reward)
