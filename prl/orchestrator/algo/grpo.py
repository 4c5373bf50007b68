"""GRPO."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from prl.orchestrator.algo.advantage import centred, efficiency_shaping
from prl.orchestrator.algo.base import Algorithm
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class GRPOAlgorithm(Algorithm):
    """Group-relative policy optimisation: credit = reward - mean reward of the group, on every sampled token.

    With `length_penalty` the rewards of correct rollouts grow by how much cheaper they are than their mean
    (`efficiency_shaping`). Source: GRPO (arXiv 2402.03300) without the length and standard-deviation terms (Dr. GRPO,
    arXiv 2503.20783).
    """

    group_relative: ClassVar[bool] = True

    length_penalty: Literal["tokens", "turns"] | None = None
    """Favour the cheaper of the best rollouts, by `tokens` or by `turns`; null = off."""
    completion_weight: Annotated[float, Ge(0)] = 1.0
    """Cost of a sampled token, for `length_penalty=tokens`."""
    tool_response_weight: Annotated[float, Ge(0)] = 1.0
    """Cost of a token of a tool's response, for `length_penalty=tokens`."""

    def score_group(self, group: list[Rollout]) -> None:
        rewards = [rollout.reward for rollout in group]
        advantages = (
            centred(rewards)
            if self.length_penalty is None
            else efficiency_shaping(rewards, [self._cost(rollout) for rollout in group])
        )
        for rollout, advantage in zip(group, advantages, strict=True):
            rollout.assign_advantages(advantage)

    def _cost(self, rollout: Rollout) -> float:
        if self.length_penalty == "turns":
            return float(rollout.num_turns)
        return (
            self.completion_weight * rollout.num_completion_tokens
            + self.tool_response_weight * rollout.num_tool_response_tokens
        )
