"""GRPO: rewards compared within a group."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from prl.algorithms.advantage import centred, leave_one_out, overlong_penalty, std_normalized
from prl.algorithms.kl import KLPenalty
from prl.algorithms.length_penalty import LengthPenalty
from prl.base.errors import ConfigError
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class OverlongPenalty:
    """DAPO's soft punishment of overlong completions (`overlong_penalty`), in sampled tokens of the whole rollout."""

    max_tokens: Annotated[int, Ge(1)] | None = None
    """A rollout with more tokens loses 1 of its reward; null = no penalty."""
    buffer: Annotated[int, Ge(0)] = 0
    """The penalty grows from 0 to 1 over this many tokens before `max_tokens`; 0 = at once."""


@dataclass(kw_only=True)
class GRPOAlgorithm(LengthPenalty, KLPenalty):
    """Group-relative policy optimisation: advantage = reward - mean reward of the group, on every sampled token.

    `length_penalty` and `overlong_penalty` shape the reward before that; the rollout keeps its own.
    With `length_penalty` the rewards of correct rollouts grow by how much cheaper they are than their mean
    (`efficiency_shaping`). `baseline`, then `normalize`, apply to the shaped rewards. Source: GRPO (arXiv 2402.03300)
    without the length and standard-deviation terms (Dr. GRPO, arXiv 2503.20783).
    """

    group_relative: ClassVar[bool] = True

    overlong_penalty: OverlongPenalty = field(default_factory=OverlongPenalty)
    """Reduce the reward of rollouts near a length limit (DAPO); off without `max_tokens`."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Baseline of a reward: the mean of the group, or of the other rollouts in the group (RLOO)."""
    normalize: Literal["std", "each"] | None = None
    """Divide advantages by the group's standard deviation of rewards (`std_normalized`). each: normalise each reward
    function on its own, then sum by their weights (GDPO); null = do not divide."""

    def check(self, where: str) -> None:
        super().check(where)
        overlong = self.overlong_penalty
        if overlong.max_tokens is not None and self.length_penalty is not None:
            raise ConfigError(f"{where}: length_penalty and overlong_penalty both price length: choose one of them")
        if overlong.buffer > (overlong.max_tokens or 0):
            raise ConfigError(
                f"{where}.overlong_penalty.buffer={overlong.buffer} must be at most {where}.overlong_penalty.max_tokens"
                f"={'null' if overlong.max_tokens is None else overlong.max_tokens}"
            )

        for name, shapes in (("length_penalty", self.length_penalty), ("overlong_penalty", overlong.max_tokens)):
            if self.normalize == "each" and shapes is not None:
                raise ConfigError(
                    f"{where}.normalize=each: {where}.{name} shapes the sum of the rewards: leave one out"
                )

    def score_group(self, group: list[Rollout]) -> None:
        if self.normalize == "each":
            advantages = [0.0] * len(group)
            for name in dict.fromkeys(name for rollout in group for name in rollout.rewards):
                # An episode that ended early may lack a reward that others have; it counts as 0 there.
                given = [rollout.rewards.get(name) for rollout in group]
                weight = max((reward.weight for reward in given if reward), default=0.0)  # the same in all
                parts = self._normalized([reward.score if reward else 0.0 for reward in given])
                advantages = [total + weight * part for total, part in zip(advantages, parts, strict=True)]
        else:
            advantages = self._normalized(self._priced(group))
        for rollout, advantage in zip(group, advantages, strict=True):
            rollout.assign_advantages(advantage)

    def _normalized(self, rewards: list[float]) -> list[float]:
        """Subtract the baseline from the rewards of a group, and divide as `normalize` says."""
        shaped = centred(rewards)
        advantages = leave_one_out(shaped) if self.baseline == "leave_one_out" else shaped
        # The deviation of the rewards, whichever baseline was subtracted: leave-one-out only scales their differences.
        return advantages if self.normalize is None else std_normalized(advantages, shaped)

    def _priced(self, group: list[Rollout]) -> list[float]:
        """Return the rewards, shaped by one of the two penalties or none."""
        rewards = self.shaped_rewards(group)
        most = self.overlong_penalty.max_tokens
        if most is not None:
            lengths = [rollout.num_completion_tokens for rollout in group]
            buffer = self.overlong_penalty.buffer
            rewards = [r + overlong_penalty(n, most, buffer) for r, n in zip(rewards, lengths, strict=True)]
        return rewards
