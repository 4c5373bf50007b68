"""Which tasks are held out for evaluation, and the settings of a taskset that has two splits."""

import hashlib
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field


def held_out(text: str) -> bool:
    """Return whether the task that `text` identifies belongs to the eval split: one in ten, by content.

    So no task is in both splits, whatever the seed or the Python process.
    """
    return hashlib.sha256(text.encode()).digest()[0] * 10 < 256


class SplitConfig(vf.TasksetConfig):
    """Settings of a taskset that draws its tasks from one of two splits."""

    split: Literal["train", "eval"] = "train"
    """Which split to draw from; no task is in both."""
    num_tasks: int = Field(1000, ge=1)
    """How many distinct tasks to draw; fewer where the split does not hold so many."""
    seed: int = 0
    """Which tasks are drawn, and their order."""

    def in_split(self, text: str) -> bool:
        """Return whether the task that `text` identifies belongs to the chosen split."""
        return held_out(text) == (self.split == "eval")
