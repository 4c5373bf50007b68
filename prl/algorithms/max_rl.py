"""MaxRL: maximum likelihood by a policy gradient."""

from dataclasses import dataclass
from typing import ClassVar

from prl.algorithms.advantage import mean_normalized
from prl.algorithms.kl import KLPenalty
from prl.algorithms.length_penalty import LengthPenalty
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class MaxRLAlgorithm(LengthPenalty, KLPenalty):
    """Maximum-likelihood RL: advantage = (reward - mean) / mean over the group; 0 where the mean is not above 0.

    Hard tasks weigh like 1 / p: with binary rewards the expected gradient is that of the maximum-likelihood objective
    truncated at order n - 1 for groups of n. Source: arXiv 2602.02710.
    """

    group_relative: ClassVar[bool] = True

    def score_group(self, group: list[Rollout]) -> None:
        for rollout, advantage in zip(group, mean_normalized(self.shaped_rewards(group)), strict=True):
            rollout.assign_advantages(advantage)
