"""GRPO."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.sampling import SamplingConfig

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


@dataclass
class GRPOConfig:
    """Group-relative policy optimisation without the division by the standard deviation."""

    _target_: str = "prl.orchestrator.algo.grpo.GRPOAlgorithm"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How rollouts are sampled."""


class GRPOAlgorithm(Algorithm):
    """Credit of every sampled token: the rollout's reward minus the mean reward of its group.

    Source: GRPO (arXiv 2402.03300) with the length and standard-deviation terms removed (Dr. GRPO, arXiv 2503.20783).
    """

    def score_group(self, group: list["Rollout"]) -> None:
        # Around the first reward, so that equal rewards give exactly zero: the mean of eight 0.1 is not 0.1 in floats.
        first = group[0].reward
        baseline = first + sum(rollout.reward - first for rollout in group) / len(group)
        for rollout in group:
            rollout.assign_advantages(rollout.reward - baseline)
