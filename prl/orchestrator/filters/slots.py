"""The two points on the road at which filters look at rollouts: before a batch, and over the cut batch."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from prl.errors import PrlError
from prl.orchestrator.filters.base import Filter
from prl.rollouts.outcome import Stage

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout

log = logging.getLogger(__name__)

SlotName = Literal["pre_batch", "post_batch"]
STAGES: dict[SlotName, Stage] = {"pre_batch": Stage.PRE_FILTERED, "post_batch": Stage.POST_FILTERED}


class FilterSlot:
    """The filters of one slot by name, asked in order.

    Invariant: only active rollouts are asked, and at most one filter of a slot is recorded for a rollout, the first
    that matches. A monitoring filter placed before an enforced one therefore hides shared matches from it.
    """

    def __init__(self, name: SlotName, filters: Mapping[str, Filter]):
        self.name = name
        self.filters = dict(filters)

    def apply(self, rollouts: Iterable["Rollout"]) -> None:
        """Record the first match of each active rollout in `matched`. If that filter enforces, the rollout leaves.

        Raises:
            PrlError: A filter failed; the message names it.
        """
        for rollout in rollouts:
            if not rollout.is_active:
                continue
            name = next((name for name in self.filters if self._matches(name, rollout)), None)
            if name is None:
                continue
            rollout.matched[self.name] = name
            if self.filters[name].enforce:
                rollout.leave(STAGES[self.name], f"filter {name}", source=name)

    def _matches(self, name: str, rollout: "Rollout") -> bool:
        try:
            return self.filters[name].matches(rollout)
        except Exception as error:  # a filter may be the user's own class
            log.exception("filters.%s.%s failed", self.name, name)
            raise PrlError(f"filters.{self.name}.{name}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Filters:
    """Both slots of an env. Evaluation applies neither."""

    pre_batch: FilterSlot = field(default_factory=lambda: FilterSlot("pre_batch", {}))
    """Applied to a credited group: a rollout that it drops takes no place in a batch."""
    post_batch: FilterSlot = field(default_factory=lambda: FilterSlot("post_batch", {}))
    """Applied to the cut batch: a rollout that it drops had its place there, and is not shipped."""

    @classmethod
    def of(cls, pre_batch: Mapping[str, Filter], post_batch: Mapping[str, Filter]) -> "Filters":
        """Both slots from their filters by name."""
        return cls(FilterSlot("pre_batch", pre_batch), FilterSlot("post_batch", post_batch))
