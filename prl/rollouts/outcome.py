"""The fate of a rollout: where it left the road from a task to a trained batch, and why."""

from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """Where a rollout left, in the order in which it can."""

    FAILED = "failed"
    """An exception or a deadline; `source` is one of `rollout.ERROR_KINDS`, `reason` the error."""
    EMPTY = "empty"
    """The model was never asked to sample, e.g. one side of a game that was over before its turn."""
    DIFFICULTY = "difficulty"
    """Online difficulty filtering dropped its group; `source` is easy or hard."""
    PRE_FILTERED = "pre_filtered"
    """An enforced filter of the `pre_batch` slot dropped it; `source` is the filter's name."""
    STALE = "stale"
    """Its policy version is too old to train on."""
    SURPLUS = "surplus"
    """Oversampling generated more than the batch takes."""
    POST_FILTERED = "post_filtered"
    """An enforced filter of the `post_batch` slot dropped it from a cut batch; `source` is the filter's name."""
    UNLEARNABLE = "unlearnable"
    """It was in a cut batch, but none of the tokens that are shipped feeds a loss component."""
    TRAINED = "trained"
    """It was shipped, and at least one of its tokens trains."""

    @property
    def in_batch(self) -> bool:
        """Whether a rollout of this outcome had a place in a cut batch."""
        return self in (Stage.POST_FILTERED, Stage.UNLEARNABLE, Stage.TRAINED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout ended. Written once, by `Rollout.leave` or `Rollout.fail`."""

    stage: Stage
    reason: str = ""
    """One sentence for a reader; equal reasons are counted together."""
    source: str | None = None
    """What caused it, as an identifier: the error kind, the filter's name, easy or hard. None for other stages."""
