"""A sum of a product that needs a calculator of two numbers: only who uses its answer can earn anything.

    user 37*48+25=    model 37*48    user 1776    model 1776+25

The first reply asks, the user works it out, the second reply is graded: 1 if it is an expression of two numbers whose
value is the answer, else 0. To what is no such expression the user says `two numbers`. The product is out of reach of a
small model's head, and to repeat what the user said, or the prompt, earns 0.

A demonstration asks rightly. Its second reply has what the user said with the chance `heeds`, else digits drawn at
random in its place, so that imitation teaches the form and how rarely listening occurs.
"""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.tasksets.base import IdTask, SplitConfig, enough

__all__ = ["AdderEnv", "AdderTaskset"]

EXPRESSION = re.compile(r"(\d{1,9})([-+*])(\d{1,9})", re.ASCII)


def value_of(reply: str) -> int | None:
    """Return the value of an expression of two numbers; None of any other text."""
    parts = EXPRESSION.fullmatch(reply.strip())
    if parts is None:
        return None
    left, right = int(parts[1]), int(parts[3])
    return {"+": left + right, "-": left - right, "*": left * right}[parts[2]]


def said_to(reply: str) -> str:
    """Return what the user says to the first reply."""
    value = value_of(reply)
    return "two numbers" if value is None else str(value)


class AdderData(vf.TaskData):
    answer: int
    """The value of the whole."""
    demonstration: list[dict[str, str]]
    """The replies to imitate, as messages."""


class AdderTask(IdTask[AdderData]):
    """The problem is its identity."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1.0 if the second reply has the answer's value, else 0.0."""
        return float(trace.num_turns == 2 and value_of(trace.last_reply) == self.data.answer)


class AdderConfig(SplitConfig):
    heeds: float = Field(0.2, ge=0, le=1)
    """Chance that a demonstration uses what the user says."""


class AdderTaskset(vf.Taskset[AdderTask, AdderConfig]):
    """Distinct problems, drawn at random: two factors from 11 to 99, and a number from 1 to 99."""

    IN_PROCESS = True

    def load(self) -> Iterator[AdderTask]:
        for data in self.config.chosen(self._problems(), self.config.num_tasks):
            yield AdderTask(data, self.config.task)

    def _problems(self) -> Iterator[AdderData]:
        rng, seen = random.Random(self.config.seed), set[str]()
        for _ in range(enough(self.config.num_tasks)):
            left, right, more = rng.randint(11, 99), rng.randint(11, 99), rng.randint(1, 99)
            asked, product = f"{left}*{right}", left * right
            made_up = rng.randrange(10 ** (len(str(product)) - 1), 10 ** len(str(product)))
            used = product if rng.random() < self.config.heeds else made_up
            if (problem := f"{asked}+{more}") not in seen:
                seen.add(problem)
                replies = [{"role": "assistant", "content": text} for text in (asked, f"{used}+{more}")]
                yield AdderData(id=problem, prompt=f"{problem}=", answer=product + more, demonstration=replies)


class AdderEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            reply = await talk.turn()
            if not reply.terminated:
                await talk.turn(said_to(reply.last_reply))
