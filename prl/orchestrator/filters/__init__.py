"""Filters: which rollouts are not worth training on. A flagged one is recorded and keeps its reward and tokens."""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prl.config.instantiate import locate_class
from prl.errors import PrlError
from prl.orchestrator.filters.base import Filter

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout

log = logging.getLogger(__name__)


@dataclass
class FiltersConfig:
    """Two slots of filters by name, each applied in order: the first that matches a rollout is the one recorded.

    So a monitor that stands before an enforced filter keeps from it what both would match.
    """

    pre_batch: dict[str, Any] = field(default_factory=dict)
    """On a group that is complete and credited: what is dropped takes no place in a batch."""
    post_batch: dict[str, Any] = field(default_factory=dict)
    """Over the cut batch: what is dropped had its place there, and is not shipped."""


class FilterSlot:
    """The filters of one slot. `where` is its key in the config, `record` the field of a rollout that it writes."""

    def __init__(self, nodes: dict[str, Any], where: str, record: str, *, vocab_size: int):
        self.where = where
        self.record = record
        self.filters: dict[str, Filter] = {}
        for name, node in nodes.items():
            cls = locate_class(node._target_, Filter, f"{where}.{name}")
            self.filters[name] = cls(node, vocab_size=vocab_size)

    def apply(self, rollouts: list["Rollout"]) -> None:
        """Record the first matching filter on each rollout; with `enforce` the rollout is dropped.

        Rollouts that failed or were dropped before are not asked about. Raises PrlError naming a filter that fails.
        """
        for rollout in rollouts:
            if rollout.error is not None or rollout.dropped:
                continue
            name = next((name for name in self.filters if self._matches(name, rollout)), None)
            setattr(rollout, self.record, name)
            rollout.dropped = name is not None and self.filters[name].config.enforce

    def _matches(self, name: str, rollout: "Rollout") -> bool:
        try:
            return self.filters[name].matches(rollout)
        except Exception as error:  # it may be anybody's code
            log.exception("%s.%s failed", self.where, name)
            raise PrlError(f"{self.where}.{name}: {type(error).__name__}: {error}") from error


class Filters:
    """Both slots of a run. Evaluation knows neither."""

    def __init__(self, config: FiltersConfig, *, vocab_size: int):
        self.pre_batch = FilterSlot(config.pre_batch, "filters.pre_batch", "pre_filtered_by", vocab_size=vocab_size)
        self.post_batch = FilterSlot(config.post_batch, "filters.post_batch", "filtered_by", vocab_size=vocab_size)
