"""Arithmetic with a calculator at hand: the model calls a tool, reads what it answers, and replies.

    user 37*48-512=    model calculate(expression="37*48-512")    tool 1264    model 1264

Reward of the last reply: `grade` of `prl.envs.tasksets.math`, 1.0 for the right integer and less than a tenth
otherwise. A call is not required. A conversation ends after `max_turns` replies; if the last one is still a call, the
reward is 0.0.
"""

import ast
import operator
import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.tasksets.base import AnswerTask, CallsCounted, SplitConfig, enough
from prl.envs.tasksets.integer import grade

__all__ = ["CalculatorEnv", "CalculatorTaskset"]

APPLY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_LENGTH = 100  # characters of an expression


def compute(expression: str) -> int:
    """Evaluate an expression over integers with +, -, * and parentheses; raise ValueError for anything else."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"an expression has at most {MAX_LENGTH} characters")
    if not re.fullmatch(r"[-+*() 0-9]*", expression):
        raise ValueError("only integers, +, -, * and parentheses")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is no expression") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in APPLY:
            return APPLY[type(operation)](_value(left), _value(right))
    raise ValueError("only integers, +, -, * and parentheses")


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None
    IN_PROCESS = True

    @vf.tool
    async def calculate(self, expression: str) -> str:
        """The value of an expression."""
        return str(compute(expression))


class CalculatorData(vf.TaskData):
    answer: int
    """The integer that a reply must spell."""


class CalculatorTask(CallsCounted, AnswerTask[CalculatorData]):
    """The problem itself is its identity."""

    def grade(self, reply: str) -> float:
        return grade(reply, self.data.answer)


class CalculatorConfig(SplitConfig):
    max_operand: int = Field(99, ge=1)
    """Operands are integers from 0 to this."""
    operands: int = Field(3, ge=2, le=10)
    """Number of operands, joined by +, - or *."""


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    """Distinct problems, drawn at random."""

    IN_PROCESS = True

    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    def load(self) -> Iterator[CalculatorTask]:
        for data in self.config.chosen(self._problems(), self.config.num_tasks):
            yield CalculatorTask(data, self.config.task)

    def _problems(self) -> Iterator[CalculatorData]:
        config, rng = self.config, random.Random(self.config.seed)
        seen: set[str] = set()
        for _ in range(enough(config.num_tasks)):
            problem = str(rng.randint(0, config.max_operand))
            for _ in range(config.operands - 1):
                problem += rng.choice("+-*") + str(rng.randint(0, config.max_operand))
            if problem not in seen:
                seen.add(problem)
                yield CalculatorData(id=problem, prompt=f"{problem}=", answer=compute(problem))


class CalculatorEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(max_turns=4, sampling=vf.SamplingConfig(max_tokens=64))


class CalculatorEnv(vf.SingleAgentEnv, vf.Env[CalculatorEnvConfig]):
    """One conversation, with the limits above."""
