"""Write a Python function: the reply's code is run against tests, in a process that can do next to nothing.

    {"prompt": "Write a Python function f that takes a number x and returns 2 * x + 1.", "tests": ["assert f(3) == 7"]}

The code is the last ``` block that defines what the tests name (`prl.envs.tasksets.code_blocks`), else the whole reply.
Tests are `assert` statements. Other statements run before the code, or, if they use names of its or stand behind one
that does, after it and in order: those before a test with it, those behind all tests as one more test. The expression
of `assert <expression> == <literal>` is evaluated where the code runs, and compared here, as Python compares: the code
never sees what is wanted. Any other assertion is evaluated there whole, and code that sets out to can make it true.
Where assertions stand in functions alone, tests are the calls after the code, such as HumanEval's `check(f)`: they hold
if they do not raise. The reward is 1.0 if all hold, else 0.1 times the share that does. Code that does not end in
`seconds`, or goes beyond another limit, fails the tests from there on. What it cannot do: `prl/envs/sandboxed.py`.

The rows are those of `prl.envs.tasksets.jsonl`; `tests` is a text or a list of them. Those that come with prl, a dozen
each of some kinds of exercises, are in `code.jsonl`.
"""

import ast
import functools
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.sandbox import SandboxFailed, evaluate, hides_files
from prl.envs.sandboxed import literal
from prl.envs.tasksets.base import IdTask
from prl.envs.tasksets.code_blocks import NO_NAMES, code_in, global_names, sure_imports
from prl.envs.tasksets.jsonl import JsonlConfig, JsonlData, JsonlTaskset

__all__ = ["CodeTaskset"]

log = logging.getLogger(__name__)

OWN = Path(__file__).with_name("code.jsonl")
"""Tasks that come with prl."""
PACKAGES = ("numpy",)
"""Packages that tests can import beside Python's own modules."""
BINDING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
"""Statements that do no more than bind a name, so that it can be bound before."""
UNABLE = re.compile(r"\b(?:asyncio\.(?:run|Runner|new_event_loop|get_event_loop)|IsolatedAsyncioTestCase)\b")
NO_USE = {"tempfile", "subprocess", "multiprocessing"}
"""Modules that are of no use to tests here, as the calls in `UNABLE`: what they do is forbidden."""


class Tests(NamedTuple):
    """Programs and values that are run and compared for a reply."""

    before: str
    """Runs before the code."""
    checks: list[tuple[str, str, Any]]
    """Each test as statements that run first, an expression and its value."""
    wanted: Set[str]
    """The names that the code is to define."""
    imports: Set[str]
    """Modules that are imported."""


@functools.lru_cache(1 << 12)
def read_tests(text: str) -> Tests:
    """Return what to run; raise ValueError for a text without a test, SyntaxError for one that is no Python."""
    program = ast.parse(text)
    for node in ast.walk(program):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and node.test.elts:
            raise ValueError(f"its line {node.lineno} asserts a tuple, which always holds")
    compile(text, "tests", "exec")
    calls_are_tests = not any(isinstance(each, ast.Assert) for each in program.body) and _asserts(program)
    before: list[str] = []
    waiting: list[ast.stmt] = []
    tests: list[tuple[str, str, Any]] = []
    known: set[str] = set()
    untested = False  # a statement that waits uses the code
    for statement in program.body:
        read, bound, _ = global_names(ast.unparse(statement)) or NO_NAMES
        uses_code = not read <= known or _asserts(statement)
        in_order = (tests or waiting) and (bound & known or not isinstance(statement, BINDING))
        if isinstance(statement, ast.Assert):
            test = _test(statement.test)
        elif not uses_code and not in_order:  # else the code could replace it
            known |= bound
            before.append(ast.unparse(statement))
            continue
        elif calls_are_tests and uses_code and isinstance(statement, ast.Expr):
            test = f"({ast.unparse(statement.value)}, True)[1]", True
        else:
            waiting.append(statement)
            untested |= uses_code and not isinstance(statement, BINDING)
            continue
        tests.append(("\n".join(map(ast.unparse, waiting)), *test))
        waiting, untested = [], False
    if not tests:
        raise ValueError("no assert, and no call of a function that has some")
    if untested:
        tests.append(("\n".join(map(ast.unparse, waiting)), "True", True))
    wanted = (global_names(text) or NO_NAMES).read
    return Tests("\n".join(before), tests, wanted, sure_imports(text))


def _asserts(program: ast.AST) -> bool:
    """Return whether there is an assertion in a program or a statement."""
    return any(isinstance(node, ast.Assert) for node in ast.walk(program))


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

    def graded_answer(self, answer: Any, row: dict[str, Any]) -> str:
        """Return the tests as one text; to HumanEval's `check`, that nothing calls, a call with the `entry_point`."""
        tests = answer if isinstance(answer, str) else "\n".join(map(str, answer))
        entry = row.get("entry_point")
        defined, called = (re.search(pattern, tests, re.MULTILINE) for pattern in (r"^def check\(", r"^check\("))
        return f"{tests}\n\ncheck({entry})" if entry and defined and not called else tests

    def fault_of(self, answer: str) -> str | None:
        """Return why these are no tests; None if they are."""
        try:
            imports = read_tests(answer).imports
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            return f"must be Python with an assert statement ({error})"
        absent = imports - {*sys.stdlib_module_names, *PACKAGES}
        return f"must not import {', '.join(sorted(absent))}: tests have Python's modules and numpy" if absent else None


class CodeTask(IdTask[JsonlData]):
    """A hash of the row is its identity."""

    settings: CodeConfig

    @vf.reward
    async def passed(self, trace: vf.Trace) -> float:
        """Return 1.0 if all tests hold, else 0.1 times the share that does; `correct` is 1.0 or 0.0."""
        before, checks, wanted, imports = read_tests(self.data.answer)
        values = await evaluate(
            before,
            code_in(trace.last_reply, wanted),
            expressions=[(statements, expression) for statements, expression, _ in checks],
            seconds=self.settings.seconds,
            memory_mb=self.settings.memory_mb,
            packages=[name for name in PACKAGES if name in imports],
        )
        hold = sum(value == right for value, (*_, right) in zip(values, checks, strict=False))
        trace.record_metric("correct", float(hold == len(checks)))
        return 1.0 if hold == len(checks) else 0.1 * hold / len(checks)


class CodeTaskset(JsonlTaskset, vf.Taskset[CodeTask, CodeConfig]):
    """Programming tasks, in random order."""

    IN_PROCESS = True

    def load(self) -> Iterator[CodeTask]:
        try:
            if not hides_files():
                log.warning("env code: this kernel has no Landlock: the code of replies can read and write your files")
        except SandboxFailed as error:
            raise ValueError(str(error)) from error
        tasks = list(super().load())
        guessed = [(task.data, names) for task in tasks if (names := names_to_guess(task.data))]
        if guessed:
            data, names = guessed[0]
            warnings.warn(
                f"env code: the tests of {len(guessed)} of {len(tasks)} rows use names that neither they nor the prompt"
                f" have: replies fail unless they guess them. First: {', '.join(sorted(names))} in {data._place}",
                stacklevel=1,
            )
        unable = [(task.data, names) for task in tasks if (names := unable_in(task.data.answer))]
        if unable:
            data, names = unable[0]
            warnings.warn(
                f"env code: the tests of {len(unable)} of {len(tasks)} rows use what needs sockets, processes or"
                f" folders of temporary files, which nothing has where code runs: replies fail. First:"
                f" {', '.join(sorted(names))} in {data._place}",
                stacklevel=1,
            )
        yield from tasks


def names_to_guess(data: JsonlData) -> Set[str]:
    """Return names of a row's tests that its prompt does not have; none where `import *` may make them."""
    prompt = data.prompt or ""
    messages = [prompt] if isinstance(prompt, str) else [str(message.content) for message in prompt]
    known = set(re.findall(r"\w+", "\n".join([data.system_prompt or "", *messages])))
    return set() if "import *" in data.answer else read_tests(data.answer).wanted - known


def unable_in(tests: str) -> Set[str]:
    """Return what tests use that fails whatever the code is."""
    return {*UNABLE.findall(tests), *(NO_USE & read_tests(tests).imports)}
