"""Advantages by turn."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from prl.algorithms.advantage import centred, discounted_returns
from prl.algorithms.kl import KLPenalty
from prl.algorithms.length_penalty import LengthPenalty
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class TurnAlgorithm(LengthPenalty, KLPenalty):
    """Advantage of a turn = its discounted return - the mean return of that turn in the group, on its sampled tokens.

    The mean of turn j is over the rollouts that have a turn j. If only one rollout has a turn j, its advantage there is
    0. A `length_penalty` adds to the reward of the last turn. Source: GRPO with process supervision (arXiv 2402.03300,
    section 4.1.3), by turns, discounted, and without its standard deviation.
    """

    group_relative: ClassVar[bool] = True

    gamma: Annotated[float, Ge(0), Le(1)] = 1.0
    """Discount of later rewards for each turn in between; 0 = each turn has only its own reward."""

    def score_group(self, group: list[Rollout]) -> None:
        credit = []
        for rollout, shaped in zip(group, self.shaped_rewards(group), strict=True):
            rewards = [turn.reward for turn in rollout.turns]
            rewards[-1] += shaped - rollout.reward
            credit.append(discounted_returns(rewards, self.gamma))
        for number in range(max(map(len, credit))):
            # Rollouts differ in length: turn by turn, those are compared that got so far.
            there = [returns for returns in credit if number < len(returns)]
            for returns, advantage in zip(there, centred([returns[number] for returns in there]), strict=True):
                returns[number] = advantage
        for rollout, advantages in zip(group, credit, strict=True):
            rollout.assign_turns(advantages)
