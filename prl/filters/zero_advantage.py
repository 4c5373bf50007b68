"""Rollouts without a gradient."""

from dataclasses import dataclass

from prl.filters.base import Filter
from prl.rollouts.components import COMPONENTS
from prl.rollouts.rewards import rounding
from prl.rollouts.rollout import Rollout


@dataclass(kw_only=True)
class ZeroAdvantage(Filter):
    """Matches rollouts whose advantages are all zero, up to rounding of their reward, and that feed no loss component
    without advantages.

    A rollout without advantages (of an algorithm that assigns none) never matches.
    """

    enforce: bool = True
    """Drop matching rollouts; false only records the match."""

    def matches(self, rollout: Rollout) -> bool:
        if rollout.advantages is None or max(map(abs, rollout.advantages), default=0.0) > rounding(rollout.reward):
            return False
        # A token may train by another loss, echo's observations say, though its advantage is zero.
        return not any(
            sample.feeds(component)
            for component in COMPONENTS.values()
            if component.requires != "advantages"
            for sample in rollout.samples
        )
