"""GRPO."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prl.errors import ConfigError
from prl.inference.sampling import SamplingConfig
from prl.orchestrator.algo.advantage import centred, efficiency_shaping
from prl.orchestrator.algo.base import Algorithm

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


@dataclass
class GRPOConfig:
    """Group-relative policy optimisation without the division by the standard deviation."""

    _target_: str = "prl.orchestrator.algo.grpo.GRPOAlgorithm"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How rollouts are sampled."""
    length_penalty: str | None = None
    """Favour the cheaper of the best rollouts, by `tokens` or by `turns`; null = off."""
    completion_weight: float = 1.0
    """Cost of a sampled token, for `length_penalty=tokens`."""
    tool_response_weight: float = 1.0
    """Cost of a token of a tool's response, for `length_penalty=tokens`."""


class GRPOAlgorithm(Algorithm):
    """Credit of every sampled token: the rollout's reward minus the mean reward of its group.

    With `length_penalty` the correct rollouts' rewards grow by how much cheaper they are than their mean
    (`efficiency_shaping`). Source: GRPO (arXiv 2402.03300) with the length and standard-deviation terms removed (Dr. GRPO,
    arXiv 2503.20783).
    """

    group_relative = True

    @classmethod
    def check(cls, config: Any, where: str) -> None:
        super().check(config, where)
        if config.length_penalty not in (None, "tokens", "turns"):
            raise ConfigError(f"{where}.length_penalty={config.length_penalty!r}: choose tokens, turns or null")
        for key in ("completion_weight", "tool_response_weight"):
            if not 0 <= getattr(config, key) < math.inf:
                raise ConfigError(f"{where}.{key} must be at least 0, got {getattr(config, key)}")

    def score_group(self, group: list["Rollout"]) -> None:
        rewards = [rollout.reward for rollout in group]
        if self.config.length_penalty is None:
            advantages = centred(rewards)
        else:
            advantages = efficiency_shaping(rewards, [self._cost(rollout) for rollout in group])
        for rollout, advantage in zip(group, advantages, strict=True):
            rollout.assign_advantages(advantage)

    def _cost(self, rollout: "Rollout") -> float:
        if self.config.length_penalty == "turns":
            return float(rollout.num_turns)
        return (
            self.config.completion_weight * rollout.num_completion_tokens
            + self.config.tool_response_weight * rollout.num_tool_response_tokens
        )
