"""MaxRL."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prl.inference.sampling import SamplingConfig
from prl.orchestrator.algo.advantage import mean_normalized
from prl.orchestrator.algo.base import Algorithm

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


@dataclass
class MaxRLConfig:
    """Maximum-likelihood reinforcement learning."""

    _target_: str = "prl.orchestrator.algo.max_rl.MaxRLAlgorithm"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How rollouts are sampled."""


class MaxRLAlgorithm(Algorithm):
    """Credit of every sampled token: (reward - mean) / mean over the group; nothing where the mean is not above zero.

    Hard tasks weigh like 1 / p: with binary rewards the gradient is, in expectation, that of the maximum-likelihood
    objective truncated at the group's size. Source: arXiv 2602.02710.
    """

    group_relative = True

    def score_group(self, group: list["Rollout"]) -> None:
        for rollout, advantage in zip(group, mean_normalized([r.reward for r in group]), strict=True):
            rollout.assign_advantages(advantage)
