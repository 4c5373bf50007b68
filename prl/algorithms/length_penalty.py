"""The length penalty, for every algorithm that computes advantages from rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from prl.algorithms.advantage import efficiency_shaping
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class LengthPenalty:
    """Options of the penalty. An algorithm with them takes the rewards of a group from `shaped_rewards`.

    The rollouts keep their own rewards, which metrics, filters and records show.
    """

    length_penalty: Literal["tokens", "turns"] | None = None
    """Favour those of a group's best rollouts that have fewer `tokens` or `turns`; null = off."""
    completion_weight: Annotated[float, Ge(0), Le(1e6)] = 1.0
    """Cost of a sampled token, for `length_penalty=tokens`."""
    tool_response_weight: Annotated[float, Ge(0), Le(1e6)] = 1.0
    """Cost of a token of a tool's response, for `length_penalty=tokens`."""

    def shaped_rewards(self, group: Sequence[Rollout]) -> list[float]:
        """The rewards for advantages (`efficiency_shaping`); without a penalty the rollouts' own."""
        rewards = [rollout.reward for rollout in group]
        if self.length_penalty is None:
            return rewards
        return efficiency_shaping(rewards, [self._cost(rollout) for rollout in group])

    def _cost(self, rollout: Rollout) -> float:
        if self.length_penalty == "turns":
            return float(rollout.trace.num_turns)
        return (
            self.completion_weight * rollout.num_completion_tokens
            + self.tool_response_weight * rollout.num_tool_response_tokens
        )
