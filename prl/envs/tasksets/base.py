"""Parts that prl's envs share: tasks that keep their identity, their grades, and a split that is held out."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import islice
from typing import Literal, Self, TypeVar

import verifiers.v1 as vf
from pydantic import Field, model_validator

from prl.rollouts.rewards import at_least

DataT = TypeVar("DataT", bound=vf.TaskData)


class IdTask(vf.Task[DataT]):
    """A task with the identity that its data's `id` gives it, whatever the seed or its position."""

    @property
    def key(self) -> str:
        return self.data.id


class CallsCounted:
    """A task whose model calls tools."""

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        """Count the tool calls."""
        return float(sum(len(message.tool_calls or []) for message in trace.assistant_messages))


class AnswerTask(IdTask[DataT]):
    """A task whose last reply is graded."""

    def grade(self, reply: str) -> float:
        """Return the reward of a reply, in [0, 1]."""
        raise NotImplementedError

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        """Grade the last reply, in [0, 1]."""
        return self.grade(trace.last_reply)

    @vf.metric
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1.0 if the last reply earns full credit, else 0.0."""
        return float(at_least(self.grade(trace.last_reply), 1.0))


def likeness(got: Sequence[str], want: Sequence[str]) -> float:
    """Return 1.0 for an exact match, else 0.2 times the share of matching blocks, 0.0 for more than twice as long."""
    if got == want:
        return 1.0
    # The matcher is quadratic: a runaway reply earns nothing by its length alone.
    if len(got) > 2 * len(want):
        return 0.0
    return 0.2 * SequenceMatcher(None, got, want, autojunk=False).ratio()


def held_out(text: str) -> bool:
    """Return whether the task that `text` identifies belongs to the eval split: one in ten, by content.

    So no task is in both splits, whatever the seed or the Python process.
    """
    return hashlib.sha256(text.encode()).digest()[0] * 10 < 256


def enough(count: int) -> int:
    """Return how many random tasks to draw for `count` of one split: the eval split finds its share in half of them."""
    return 20 * count + 1000


class SplitConfig(vf.TasksetConfig):
    """Settings of a taskset that draws its tasks from one of two splits. No `max_x` may be below its `min_x`."""

    split: Literal["train", "eval"] = "train"
    """Split to draw from; no task is in both."""
    num_tasks: int = Field(1000, ge=1)
    """Number of distinct tasks to draw; fewer where the split does not hold so many."""
    seed: int = 0
    """Seed of the choice of tasks, and of their order."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for what in [name.removeprefix("min_") for name in type(self).model_fields if name.startswith("min_")]:
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if high < low:
                raise ValueError(f"max_{what}={high} is below min_{what}={low}")
        return self

    def in_split(self, text: str) -> bool:
        """Return whether the task that `text` identifies belongs to the chosen split."""
        return held_out(text) == (self.split == "eval")

    def chosen(self, candidates: Iterable[DataT], count: int) -> Iterator[DataT]:
        """Yield the first `count` candidates of the chosen split, which their `id` decides."""
        return islice((data for data in candidates if self.in_split(data.id)), count)

    def drawn(self, make: Callable[[int], DataT], size: int, count: int, rng: random.Random) -> Iterator[DataT]:
        """Draw `count` tasks of the chosen split without replacement; `make` makes the `size` there are by number."""
        return self.chosen(map(make, rng.sample(range(size), min(size, enough(count)))), count)
