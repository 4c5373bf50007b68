"""Sort words in several rounds: each adds words, and the whole sorted list is asked for again.

    user sort: ba ca ad    model ad ba ca    user add: bb    model ad ba bb ca

The reward is the mean of the rounds' grades; each turn's part of it is its process reward, which `algo=turn` reads. A
round that was not reached, because the context was full, counts 0. The next round follows any reply, right or wrong.
Grade of a reply x against the answer y, both as lists of words:

    1.0                 x = y
    0.2 * 2M / T        otherwise, at most twice as many words as y: M words in matching blocks of the T = |x| + |y|
                        words in both (`difflib.SequenceMatcher.ratio`, Ratcliff and Obershelp)
    0.0                 more words than that

So the answer `ad ba ca` grades `ad ba ca` 1.0, `ad ba` 0.16, `ba ca ad` 0.1333, `ad, ba, ca` 0.0667 and the empty
reply 0.0. To reply `ad ba ca` to both turns above earns (1.0 + 0.2 * 6/7) / 2 = 0.5857.
"""

import random
from collections.abc import Iterator
from itertools import zip_longest
from string import ascii_lowercase as LETTERS

import verifiers.v1 as vf
from pydantic import Field, model_validator

from prl.envs.tasksets.base import IdTask, SplitConfig, likeness

__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]

PATIENCE = 1000
"""Draws in a row without a new task, after which a small space of tasks counts as used up."""


def grade(reply: str, answer: str) -> float:
    """Return the grade of one round's `reply` in [0, 1], by the formula above; any whitespace separates words."""
    return likeness(reply.split(), answer.split())


class AlphabetSortData(vf.TaskData):
    later: list[str]
    """The user's message after each reply except the last."""
    answers: list[str]
    """The right reply of each round."""


class AlphabetSortTask(IdTask[AlphabetSortData]):
    """Its words by round are its identity."""

    def grades(self, trace: vf.Trace) -> list[float]:
        """Return the grade of each round, 0.0 for rounds that were not reached."""
        replies = [message.content or "" for message in trace.assistant_messages]
        return [grade(reply, answer) for reply, answer in zip_longest(replies, self.data.answers, fillvalue="")]

    @vf.reward
    async def rounds(self, trace: vf.Trace) -> list[float]:
        """Return each turn's part of the mean grade of the rounds: together a reward in [0, 1]."""
        grades = self.grades(trace)
        return [grade / len(grades) for grade in grades[: trace.num_turns]]

    @vf.metric
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1.0 if every round earns full credit, else 0.0."""
        return float(min(self.grades(trace)) == 1.0)


class AlphabetSortConfig(SplitConfig):
    """A task belongs to a split by the words of its first round, in any order."""

    min_rounds: int = Field(2, ge=1, le=1000)
    """Fewest rounds. The number is uniform in its range, as are all numbers below."""
    max_rounds: int = Field(3, ge=1, le=1000)
    """Most rounds."""
    min_words: int = Field(3, ge=1, le=1000)
    """Fewest words in the first round."""
    max_words: int = Field(3, ge=1, le=1000)
    """Most words in the first round."""
    min_added: int = Field(1, ge=1, le=1000)
    """Fewest words that a later round adds."""
    max_added: int = Field(2, ge=1, le=1000)
    """Most words that a later round adds."""
    min_letters: int = Field(2, ge=1, le=100)
    """[letters] Shortest word; words are random and lowercase, no two in a task the same."""
    max_letters: int = Field(4, ge=1, le=100)
    """[letters] Longest word."""

    @model_validator(mode="after")
    def _possible(self) -> "AlphabetSortConfig":
        most = self.max_words + (self.max_rounds - 1) * self.max_added
        there_are = sum(len(LETTERS) ** length for length in range(self.min_letters, self.max_letters + 1))
        if most > there_are:
            raise ValueError(f"a task may take {most} different words, and there are {there_are}: raise max_letters")
        return self


class AlphabetSortTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    """Random words, drawn for each task; no task occurs twice."""

    IN_PROCESS = True

    def load(self) -> Iterator[AlphabetSortTask]:
        rng, misses = random.Random(self.config.seed), 0
        seen: set[str] = set()
        while len(seen) < self.config.num_tasks and misses < PATIENCE:
            rounds = self._rounds(rng)
            first, *later = [" ".join(words) for words in rounds]
            name = " | ".join([first, *later])
            misses += 1
            if name not in seen and self.config.in_split(" ".join(sorted(rounds[0]))):
                seen.add(name)
                misses = 0
                data = AlphabetSortData(
                    id=name,
                    prompt=f"sort: {first}",
                    later=[f"add: {words}" for words in later],
                    answers=[
                        " ".join(sorted(word for words in rounds[:end] for word in words))
                        for end in range(1, len(rounds) + 1)
                    ],
                )
                yield AlphabetSortTask(data, self.config.task)

    def _rounds(self, rng: random.Random) -> list[list[str]]:
        """Draw the words of each round."""
        config = self.config
        sizes = [rng.randint(config.min_words, config.max_words)]
        sizes += [
            rng.randint(config.min_added, config.max_added)
            for _ in range(rng.randint(config.min_rounds, config.max_rounds) - 1)
        ]
        words: dict[str, None] = {}  # an ordered set
        while len(words) < sum(sizes):
            length = rng.randint(config.min_letters, config.max_letters)
            words["".join(rng.choices(LETTERS, k=length))] = None
        drawn = iter(words)
        return [[next(drawn) for _ in range(size)] for size in sizes]


class AlphabetSortEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(sampling=vf.SamplingConfig(max_tokens=96))


class AlphabetSortEnv(vf.Env[AlphabetSortEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            reply = await talk.turn()
            for message in task.data.later:
                if reply.terminated:
                    return
                reply = await talk.turn(message)
