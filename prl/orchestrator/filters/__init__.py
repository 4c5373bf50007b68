"""Filters: what of a batch is worth training on. A flagged rollout is recorded and keeps its reward and tokens."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prl.config.build import locate_class
from prl.orchestrator.filters.base import Filter

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout


@dataclass
class FiltersConfig:
    """Filters by name, applied in order; the first that matches a rollout is the one recorded."""

    post_batch: dict[str, Any] = field(default_factory=dict)
    """Over the cut batch: flagged rollouts are recorded, not shipped."""


class FilterSlot:
    """The filters of one slot."""

    def __init__(self, nodes: dict[str, Any], where: str):
        self.filters: dict[str, Filter] = {}
        for name, node in nodes.items():
            cls = locate_class(node._target_, Filter, f"{where}.{name}")
            self.filters[name] = cls(node)

    def apply(self, rollouts: list["Rollout"]) -> None:
        """Record the first matching filter on each rollout; with `enforce` the rollout is dropped."""
        for rollout in rollouts:
            if rollout.error is not None:
                continue
            for name, filter_ in self.filters.items():
                if filter_.matches(rollout):
                    rollout.filtered_by = name
                    rollout.dropped = filter_.config.enforce
                    break
