"""Write a Python function: the reply's code is run against tests, in a process that can do next to nothing.

    {"prompt": "Write a Python function f that takes a number x and returns 2 * x + 1.", "tests": ["assert f(3) == 7"]}

The code is what stands in the reply's last ``` block, else the whole reply. Tests are `assert` statements; other
statements run before the code, or, if they use names of its, after it and before all tests. The expression of
`assert <expression> == <literal>` is evaluated where the code runs, and compared here, as Python compares: the code
never sees what is wanted. Any other assertion is evaluated there whole, and code that sets out to can make it true.
Where assertions stand in functions alone, tests are the calls after the code, such as HumanEval's `check(f)`: they hold
if they do not raise. The reward is 1.0 if all hold, else 0.1 times the share that does. Code that does not end in
`seconds`, or goes beyond another limit, fails the tests from there on. What it cannot do: `prl/envs/sandboxed.py`.

The rows are those of `prl.envs.tasksets.jsonl`; `tests` is a text or a list of them. Those that come with prl, a dozen
each of some kinds of exercises, are in `code.jsonl`.
"""

import ast
import builtins
import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.sandbox import SandboxFailed, evaluate, hides_files
from prl.envs.sandboxed import literal
from prl.envs.tasksets.base import IdTask
from prl.envs.tasksets.jsonl import JsonlConfig, JsonlData, JsonlTaskset

__all__ = ["CodeTaskset"]

log = logging.getLogger(__name__)

BLOCK = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
OWN = Path(__file__).with_name("code.jsonl")
"""Tasks that come with prl."""


def code_in(reply: str) -> str:
    """Return the code of a reply: its last block, else all of it."""
    blocks = BLOCK.findall(reply)
    return blocks[-1] if blocks else reply


@functools.lru_cache(1 << 12)
def read_tests(text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return what runs before the code, what after it, and each test as an expression and its value.

    Raises ValueError for a text without a test, SyntaxError for one that is no Python.
    """
    before: list[str] = []
    after: list[ast.stmt] = []
    tests: list[tuple[str, Any]] = []
    known = set(dir(builtins))
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assert):
            tests.append(_test(statement.test))
            continue
        used, made = _names(statement)
        if used <= known | made and not _asserts(statement):  # else the code could replace it
            known |= made
            before.append(ast.unparse(statement))
        else:
            after.append(statement)
    if not tests and any(map(_asserts, after)):
        calls = [each for each in after if isinstance(each, ast.Expr)]
        after = [each for each in after if not isinstance(each, ast.Expr)]
        tests = [(f"({ast.unparse(each.value)}, True)[1]", True) for each in calls]
    if not tests:
        raise ValueError("no assert, and no call of a function that has some")
    return "\n".join(before), "\n".join(map(ast.unparse, after)), tests


def _asserts(statement: ast.stmt) -> bool:
    """Return whether there is an assertion in a statement."""
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the names that a statement reads, and those that it makes."""
    used: set[str] = set()
    made: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
    return used, made


def _test(test: ast.expr) -> tuple[str, Any]:
    if isinstance(test, ast.Compare) and [type(each) for each in test.ops] == [ast.Eq]:
        try:
            wanted = ast.literal_eval(test.comparators[0])
            return ast.unparse(test.left), ast.literal_eval(literal(wanted))
        except (ValueError, TypeError):  # no literal, or one that does not come back: 1e999
            pass
    return f"bool({ast.unparse(test)})", True


class CodeConfig(JsonlConfig):
    path: str = str(OWN)
    """As of `jsonl`; those of prl if it is left out."""
    answer_key: str | None = "tests"
    grader: Literal["tests"] = "tests"
    seconds: float = Field(5.0, gt=0, le=3600)
    """[s] Time that the code and its tests have."""
    memory_mb: int = Field(512, ge=64, le=1 << 20)
    """[MiB] Address space that they have; Python itself takes some 40."""
    answer_types: ClassVar[tuple[type, ...]] = (str, list)

    def graded_answer(self, answer: Any) -> str:
        """Return the tests as one text."""
        return answer if isinstance(answer, str) else "\n".join(map(str, answer))

    def fault_of(self, answer: str) -> str | None:
        """Return why these are no tests; None if they are."""
        try:
            read_tests(answer)
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            return f"must be Python with an assert statement ({error})"
        return None


class CodeTask(IdTask[JsonlData]):
    """A hash of the row is its identity."""

    settings: CodeConfig

    @vf.reward
    async def passed(self, trace: vf.Trace) -> float:
        """Return 1.0 if all tests hold, else 0.1 times the share that does; `correct` is 1.0 or 0.0."""
        before, after, tests = read_tests(self.data.answer)
        code = (before, code_in(trace.last_reply), after)
        expressions = [expression for expression, _ in tests]
        seconds, memory_mb = self.settings.seconds, self.settings.memory_mb
        values = await evaluate(*code, expressions=expressions, seconds=seconds, memory_mb=memory_mb)
        hold = sum(value == wanted for value, (_, wanted) in zip(values, tests, strict=False))
        trace.record_metric("correct", float(hold == len(tests)))
        return 1.0 if hold == len(tests) else 0.1 * hold / len(tests)


class CodeTaskset(JsonlTaskset, vf.Taskset[CodeTask, CodeConfig]):
    """Programming tasks, in random order."""

    IN_PROCESS = True

    def load(self) -> Iterator[CodeTask]:
        try:
            if not hides_files():
                log.warning("env code: this kernel has no Landlock: the code of replies can read and write your files")
        except SandboxFailed as error:
            raise ValueError(str(error)) from error
        yield from super().load()
