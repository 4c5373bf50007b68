"""Reverse a string of lowercase letters: the prompt is `reverse: abcd`, the answer `dcba`.

Reward of a reply x against the answer y:

    1.0                 x = y
    0.2 * 2M / T        otherwise, at most as long as twice y: M letters in matching blocks of the T = |x| + |y|
                        letters in both (`difflib.SequenceMatcher.ratio`, Ratcliff and Obershelp)
    0.0                 longer than that

So the answer `dcba` grades `dcba` 1.0, `dcbb` 0.15, `dc` 0.1333, `abcd` 0.05 and the empty reply 0.0.
"""

import random
import string
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import islice
from typing import Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from prl.envs.splits import SplitConfig

__all__ = ["ReverseTextTaskset"]

LETTERS = string.ascii_lowercase


def grade(reply: str, answer: str) -> float:
    """Return the reward of `reply` in [0, 1], by the formula above, ignoring surrounding whitespace."""
    reply = reply.strip()
    if reply == answer:
        return 1.0
    # The matcher is quadratic: a runaway reply earns nothing by its length alone.
    if len(reply) > 2 * len(answer):
        return 0.0
    return 0.2 * SequenceMatcher(None, reply, answer, autojunk=False).ratio()


class ReverseTextData(vf.TaskData):
    answer: str
    """The prompt's letters, last first."""
    demonstration: str
    """A worked solution, shown to a reference model by `opsd`; not part of the prompt."""


class ReverseTextTask(vf.Task[ReverseTextData]):
    @property
    def key(self) -> str:
        """The string itself, so that a task keeps its identity across seeds and positions."""
        return self.data.id

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        """Grade the last reply, in [0, 1]."""
        return grade(trace.last_reply, self.data.answer)

    @vf.metric
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1.0 if the last reply earns full credit, else 0.0."""
        return float(grade(trace.last_reply, self.data.answer) == 1.0)


class ReverseTextConfig(SplitConfig):
    min_length: int = Field(3, ge=1)
    """[letters] Shortest string; every length gets an equal share of the tasks, or all the strings it has."""
    max_length: int = Field(7, ge=1)
    """[letters] Longest string."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_length < self.min_length:
            raise ValueError(f"max_length={self.max_length} is below min_length={self.min_length}")
        return self


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Strings drawn without replacement, an equal share of each length, in random order."""

    def load(self) -> Iterator[ReverseTextTask]:
        config, rng = self.config, random.Random(self.config.seed)
        lengths = range(config.min_length, config.max_length + 1)
        texts = []
        for rank, length in enumerate(lengths):
            share = (config.num_tasks + rank) // len(lengths)
            texts += self._texts(length, share, rng)
        rng.shuffle(texts)
        for text in texts:
            answer = text[::-1]
            data = ReverseTextData(
                id=text, prompt=f"reverse: {text}", answer=answer, demonstration=f"{', '.join(answer)} -> {answer}"
            )
            yield ReverseTextTask(data, self.config.task)

    def _texts(self, length: int, share: int, rng: random.Random) -> list[str]:
        size = len(LETTERS) ** length
        # The split that holds one string in ten finds its share in twice that; a small space is drawn whole.
        drawn = rng.sample(range(size), min(size, 20 * share + 1000))
        texts = (_spell(index, length) for index in drawn)
        return list(islice(filter(self.config.in_split, texts), share))


def _spell(index: int, length: int) -> str:
    """Return the string of `length` letters that are the digits of `index` in base 26, least significant first."""
    letters = []
    for _ in range(length):
        index, digit = divmod(index, len(LETTERS))
        letters.append(LETTERS[digit])
    return "".join(letters)
