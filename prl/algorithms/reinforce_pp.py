"""REINFORCE++: advantages normalised over a batch."""

from dataclasses import dataclass
from itertools import chain

from prl.algorithms.advantage import centred, std_normalized
from prl.algorithms.grpo import GRPOAlgorithm
from prl.base.errors import ConfigError
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class ReinforcePPAlgorithm(GRPOAlgorithm):
    """GRPO's advantage, or the reward itself, minus the mean of the env's batch, divided by the deviation there.

    Mean and sample deviation (plus 1e-6) are over the rollouts that the batch was cut from, before `post_batch`
    filters. Source: REINFORCE++ (arXiv 2501.03262), which takes them over tokens in its code.
    """

    group_baseline: bool = True
    """true = from GRPO's advantages, for several rollouts a task (REINFORCE++-baseline in the paper). false = from the
    reward (REINFORCE++)."""

    @property
    def group_relative(self) -> bool:  # type: ignore[override]  # it depends on an option here
        return self.group_baseline

    def check(self, where: str) -> None:
        super().check(where)
        for key, value, default in (("baseline", self.baseline, "mean"), ("normalize", self.normalize, None)):
            if not self.group_baseline and value != default:
                raise ConfigError(f"{where}.{key}={value} is about the group: leave it or group_baseline=false out")

    def score_group(self, group: list[Rollout]) -> None:
        if self.group_baseline:
            return super().score_group(group)
        for rollout, reward in zip(group, self._priced(group), strict=True):
            rollout.assign_advantages(reward)

    def score_batch(self, groups: list[list[Rollout]]) -> None:
        rollouts = list(chain.from_iterable(groups))
        # One number a rollout: the advantage is the same at every sampled token, and 0 at the others.
        middle = centred([max(rollout.advantages or [0.0], key=abs) for rollout in rollouts])
        for rollout, advantage in zip(rollouts, std_normalized(middle, middle), strict=True):
            rollout.assign_advantages(advantage)
