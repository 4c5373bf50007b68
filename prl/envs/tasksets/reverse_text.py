"""Reverse a string of lowercase letters: the prompt is `reverse: abcd`, the answer `dcba`.

Reward of a reply x against the answer y:

    1.0                 x = y
    0.2 * 2M / T        otherwise, at most as long as twice y: M letters in matching blocks of the T = |x| + |y|
                        letters in both (`difflib.SequenceMatcher.ratio`, Ratcliff and Obershelp)
    0.0                 longer than that

So the answer `dcba` grades `dcba` 1.0, `dcbb` 0.15, `dc` 0.1333, `abcd` 0.05 and the empty reply 0.0.
"""

import random
from collections.abc import Iterator
from functools import partial
from string import ascii_lowercase as LETTERS

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.tasksets.base import AnswerTask, SplitConfig, likeness

__all__ = ["ReverseTextTaskset"]


def grade(reply: str, answer: str) -> float:
    """Return the reward of `reply` in [0, 1], by the formula above, ignoring surrounding whitespace."""
    return likeness(reply.strip(), answer)


class ReverseTextData(vf.TaskData):
    answer: str
    """The prompt's letters, last first."""
    demonstration: str
    """A worked solution, shown to a reference model by `opsd`; not part of the prompt."""


class ReverseTextTask(AnswerTask[ReverseTextData]):
    """The string itself is its identity."""

    def grade(self, reply: str) -> float:
        return grade(reply, self.data.answer)


class ReverseTextConfig(SplitConfig):
    min_length: int = Field(3, ge=1)
    """[letters] Shortest string; every length gets an equal share of the tasks, or all the strings it has."""
    max_length: int = Field(7, ge=1)
    """[letters] Longest string."""


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Strings drawn without replacement, an equal share of each length, in random order."""

    IN_PROCESS = True

    @property
    def MAX_TOKENS(self) -> int:
        """Return where each character is a token, a worked solution has four a letter, and six."""
        return max(64, 4 * self.config.max_length + 8)

    def load(self) -> Iterator[ReverseTextTask]:
        config, rng = self.config, random.Random(self.config.seed)
        lengths = range(config.min_length, config.max_length + 1)
        problems: list[ReverseTextData] = []
        for rank, length in enumerate(lengths):
            share = (config.num_tasks + rank) // len(lengths)
            problems += config.drawn(partial(_problem, length), len(LETTERS) ** length, share, rng)
        rng.shuffle(problems)
        return (ReverseTextTask(data, config.task) for data in problems)


def _problem(length: int, number: int) -> ReverseTextData:
    """Return the task to reverse `length` letters, the digits of `number` in base 26, least significant first."""
    text = "".join(LETTERS[number // len(LETTERS) ** place % len(LETTERS)] for place in range(length))
    answer = text[::-1]
    return ReverseTextData(
        id=text, prompt=f"reverse: {text}", answer=answer, demonstration=f"{', '.join(answer)} -> {answer}"
    )
