"""Rollouts that carry no gradient."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prl.orchestrator.filters.base import Filter

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


@dataclass
class ZeroAdvantageConfig:
    """Drop rollouts whose advantages are all zero."""

    _target_: str = "prl.orchestrator.filters.zero_advantage.ZeroAdvantage"
    enforce: bool = True
    """Drop matches from the batch, not just record them."""


class ZeroAdvantage(Filter):
    """Matches when an advantage stream exists, is all zero, and no other loss component has weight on the rollout.

    No advantages at all (an algorithm that assigns none) is not a match.
    """

    def matches(self, rollout: "Rollout") -> bool:
        if rollout.advantages is None or any(rollout.advantages):
            return False
        streams = ((s.ce_weights, s.ref_kl_weights) for s in rollout.samples)
        return not any(any(weights) for pair in streams for weights in pair if weights)
