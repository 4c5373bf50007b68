"""Guess a number: after each guess the user says whether the secret is higher or lower.

    user 1-20    model 10    user higher    model 15    user lower    model 12

The reward is 1.0 if the secret is named in as many guesses as bisection may need, `n.bit_length()` for 1 to n (5 for
20), plus `slack`; else 0.0. A reply that is not an integer is a wasted guess, to which the user says `a number`.
"""

import math
import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.tasksets.base import IdTask, SplitConfig

__all__ = ["GuessEnv", "GuessTaskset"]

INTEGER = re.compile(r"-?[0-9]{1,9}")


def answer(guess: str, secret: int) -> str | None:
    """Return the user's answer to a guess; None if the guess is right."""
    if not INTEGER.fullmatch(guess.strip()):
        return "a number"
    value = int(guess)
    return None if value == secret else "higher" if secret > value else "lower"


class GuessData(vf.TaskData):
    secret: int
    """The number to be guessed."""
    guesses: int
    """Number of guesses allowed."""


class GuessTask(IdTask[GuessData]):
    """Range and secret are its identity."""

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        """Return 1.0 if the last guess is right, else 0.0."""
        return float(answer(trace.last_reply, self.data.secret) is None)

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        """Count the guesses."""
        return float(trace.num_turns)


class GuessConfig(SplitConfig):
    """A task is a pair of range and secret."""

    min_size: int = Field(8, ge=2)
    """Numbers in the smallest range."""
    max_size: int = Field(40, ge=2, le=999_999_999)
    """Numbers in the largest range; a guess has nine digits at most."""
    slack: int = Field(0, ge=0)
    """Guesses allowed beyond those that bisection may need."""


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    """Ranges from 1 to n with each secret in them, drawn without replacement."""

    IN_PROCESS = True

    def load(self) -> Iterator[GuessTask]:
        config = self.config
        size = _before(config.max_size + 1) - _before(config.min_size)
        drawn = config.drawn(self._pair, size, config.num_tasks, random.Random(config.seed))
        return (GuessTask(data, config.task) for data in drawn)

    def _pair(self, number: int) -> GuessData:
        """Return range and secret at position `number` of those from `min_size` on: (8, 1), (8, 2), ..., (9, 1), ..."""
        number += _before(self.config.min_size)
        n = (math.isqrt(8 * number + 1) + 1) // 2
        secret = number - _before(n) + 1
        guesses = n.bit_length() + self.config.slack
        return GuessData(id=f"1-{n}: {secret}", prompt=f"1-{n}", secret=secret, guesses=guesses)


def _before(n: int) -> int:
    """Return how many pairs have a range smaller than `n`: 0 + 1 + ... + (n - 1)."""
    return n * (n - 1) // 2


class GuessEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(sampling=vf.SamplingConfig(max_tokens=16))


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            reply = await talk.turn()
            for _ in range(task.data.guesses - 1):
                message = answer(reply.last_reply, task.data.secret)
                if message is None or reply.terminated:
                    return
                reply = await talk.turn(message)
