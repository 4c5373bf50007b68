"""Integer arithmetic: the prompt is `12+34=`, the answer `46`.

Reward of a reply, with y the answer and x the integer the reply spells:

    1.0                      x = y
    0.1 * hits / positions   x != y, same sign: hits = digits equal when |x| and |y| are aligned
                             from the right, positions = digits of the longer of the two
    0.0                      not an integer, or of the other sign

So the answer 46 grades `46` 1.0, `56` 0.05, `146` 0.0667, `-46` and `about 46` 0.0. The partial credit
stays under a tenth: it breaks ties among wrong replies, and is never worth giving up a right one.
"""

import operator
import random
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.tasksets.base import AnswerTask, SplitConfig
from prl.envs.tasksets.integer import grade

__all__ = ["MathTaskset"]

Operation = Literal["+", "-", "*"]
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def work_out(left: int, operation: Operation, right: int) -> str:
    """Return a worked solution that ends in the answer, e.g. `47+85 = (40+80) + (7+5) = 120 + 12 = 132`."""
    tens, ones = left - left % 10, left % 10
    # A product splits its left factor only: 47*85 = (40*85) + (7*85).
    other_tens, other_ones = (right, right) if operation == "*" else (right - right % 10, right % 10)
    split = f"({tens}{operation}{other_tens}) + ({ones}{operation}{other_ones})"
    high, low = APPLY[operation](tens, other_tens), APPLY[operation](ones, other_ones)
    return f"{left}{operation}{right} = {split} = {high} + {low} = {high + low}"


class MathData(vf.TaskData):
    answer: int
    """The integer that a reply must spell."""
    demonstration: str
    """A worked solution, shown to a reference model by `opsd`; not part of the prompt."""


class MathTask(AnswerTask[MathData]):
    """The problem itself is its identity."""

    def grade(self, reply: str) -> float:
        return grade(reply, self.data.answer)


class MathConfig(SplitConfig):
    max_operand: int = Field(99, ge=1)
    """Operands are integers from 0 to this."""
    operations: tuple[Operation, ...] = Field(("+", "-"), min_length=1)
    """Operators, drawn with equal chance."""


class MathTaskset(vf.Taskset[MathTask, MathConfig]):
    """Problems drawn without replacement from the `len(operations) * (max_operand + 1) ** 2` there are."""

    IN_PROCESS = True
    MAX_TOKENS = 64  # a worked solution has some fifty

    def load(self) -> Iterator[MathTask]:
        config = self.config
        size = len(config.operations) * (config.max_operand + 1) ** 2
        for data in config.drawn(self._problem, size, config.num_tasks, random.Random(config.seed)):
            yield self.task_type()(data, config.task)

    def _problem(self, number: int) -> MathData:
        rest, right = divmod(number, self.config.max_operand + 1)
        kind, left = divmod(rest, self.config.max_operand + 1)
        operation = self.config.operations[kind]
        return MathData(
            id=f"{left}{operation}{right}",
            prompt=f"{left}{operation}{right}=",
            answer=APPLY[operation](left, right),
            demonstration=work_out(left, operation, right),
        )
