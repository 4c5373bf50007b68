"""Text of models, judges, envs, data files and logs is read in time that grows no faster than its length.

Every regular expression over such text is tried with texts made of what it looks for: runs of one piece, of pairs, and
of either behind what may begin a match, with and without an end that does not match. Time is that of this thread.
"""

import ast
import contextlib
import functools
import importlib
import itertools
import random
import re
import time
from pathlib import Path
from re import _constants, _parser  # the only parser of regular expressions there is

import pytest

import prl
from prl.envs.tasksets import numbers
from prl.envs.tasksets.alphabet_sort import grade as sorted_grade
from prl.envs.tasksets.code_blocks import code_in
from prl.envs.tasksets.graders import exact, numeric
from prl.envs.tasksets.guess import answer as guessed
from prl.envs.tasksets.integer import grade as integer_grade
from prl.envs.tasksets.judge import score_in
from prl.envs.tasksets.reasoning_gym import tagged
from prl.envs.tasksets.reverse_text import grade as reversed_grade

ROOT = Path(prl.__file__).parents[1]
READERS = (
    "prl/envs",
    "prl/engines/template_check.py",
    "prl/monitors",
    "prl/tools/report/tables.py",
    "prl/launch/processes.py",
)
"""What reads text that others wrote."""
CALLS = {"match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
SHORT, TIMES = 1000, 4


def modules():
    """The source of each module of the readers, and its name."""
    for place in READERS:
        for path in [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py")):
            name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
            yield ast.parse(path.read_text()), name


def patterns():
    """Each regular expression by the place where it stands, and the methods that are called with it."""
    found = {}
    for tree, name in modules():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        used = {}
        for call in calls:
            if isinstance(call.func.value, ast.Name | ast.Attribute) and call.func.attr in CALLS:
                owner = call.func.value
                used.setdefault(owner.id if isinstance(owner, ast.Name) else owner.attr, set()).add(call.func.attr)
        if not any(isinstance(node, ast.Name) and node.id == "re" for node in ast.walk(tree)):
            continue
        module = importlib.import_module(name)
        for attribute, value in [*vars(module).items(), *vars(getattr(module, "Terminal", object)).items()]:
            if isinstance(value, re.Pattern):
                found[f"{name}.{attribute}"] = (value, used.get(attribute, {"search"}))
            if isinstance(value, dict) and value and all(isinstance(each, re.Pattern) for each in value.values()):
                found |= {f"{name}.{attribute}[{key}]": (each, {"fullmatch"}) for key, each in value.items()}
        for call in calls:
            if isinstance(call.func.value, ast.Name) and call.func.value.id == "re" and call.func.attr in CALLS:
                try:
                    text = eval(compile(ast.Expression(call.args[0]), name, "eval"), dict(vars(module)))
                except NameError:  # made of a local value, such as a config's
                    continue
                found[f"{name}:{call.lineno}"] = (re.compile(text), {call.func.attr})
    for table in (numbers.SPELLINGS, numbers.FLAT_SPELLINGS):
        found |= {f"numbers {pattern}": (re.compile(pattern), {"sub"}) for pattern in table}
    return found


CATEGORIES = {
    _constants.CATEGORY_DIGIT: "1",
    _constants.CATEGORY_SPACE: " ",
    _constants.CATEGORY_WORD: "a",
    _constants.CATEGORY_NOT_WORD: "-",
}


def pieces(parsed):
    """Characters and words that a parsed regular expression looks for."""
    word = ""
    for operation, value in parsed:
        if operation is _constants.LITERAL:
            word += chr(value)
            yield chr(value)
            continue
        yield from [word] if len(word) > 1 else []
        word = ""
        if operation is _constants.IN:
            yield from pieces(value)
        elif operation is _constants.RANGE:
            yield chr(value[0])
        elif operation is _constants.CATEGORY:
            yield CATEGORIES.get(value, "a")
        elif operation in (_constants.ANY, _constants.NOT_LITERAL):
            yield "a"
        elif operation is _constants.BRANCH:
            yield from itertools.chain(*map(pieces, value[1]))
        elif isinstance(value, tuple) and isinstance(value[-1], _parser.SubPattern):
            yield from pieces(value[-1])
        elif isinstance(value, _parser.SubPattern):
            yield from pieces(value)
    yield from [word] if len(word) > 1 else []


def texts(parts):
    """Makers of a text of a given length."""
    runs = [*parts, *map("".join, itertools.permutations(parts[:5], 2))]
    makers = list(itertools.product(runs, ["", *parts[:2]], ["", "\x00"]))
    for run, head, end in random.Random(0).sample(makers, min(len(makers), 250)):
        yield lambda length, run=run, head=head, end=end: head + run * (length // len(run)) + end


def slow(read, makers):
    """A text for which a text of four times its length takes more than eight times as long; None if there is none."""

    def seconds(text, times=1):
        best = float("inf")
        for _ in range(times):
            started = time.thread_time()
            read(text)
            best = min(best, time.thread_time() - started)
        return best

    for make in makers:
        short, long = make(SHORT), make(SHORT * TIMES)
        if seconds(long) < 0.004:
            continue
        if seconds(long, 3) > 2 * TIMES * seconds(short, 3) + 0.002:
            return short[:60]
    return None


PATTERNS = patterns()


@pytest.mark.parametrize("place", PATTERNS)
def test_a_pattern_takes_time_in_proportion_to_the_text(place):
    pattern, methods = PATTERNS[place]
    parts = list(dict.fromkeys([*pieces(_parser.parse(pattern.pattern, pattern.flags)), "a", " "]))
    first = [method for method in methods if method in ("match", "fullmatch")]
    for method in [*first, *(["finditer"] if len(first) < len(methods) else [])]:
        read = getattr(pattern, method)
        found = slow(functools.partial(consumed, read) if method == "finditer" else read, texts(parts))
        assert found is None, (place, method, found)


def consumed(read, text):
    return list(read(text))


def scored(text):
    with contextlib.suppress(ValueError):
        return score_in(text, 10)


FUNCTIONS = {
    "exact": lambda text: exact(text, "4"),
    "numeric": lambda text: numeric(text, "4"),
    "code": lambda text: code_in(text, {"f"}),
    "score": scored,
    "integer": lambda text: integer_grade(text, 4),
    "guess": lambda text: guessed(text, 4),
    "reversed": lambda text: reversed_grade(text, "four"),
    "sorted": lambda text: sorted_grade(text, "four"),
    "tagged": tagged,
}
RUNS = [
    "#",
    "####",
    "#### \n",
    "答",
    "½",
    "$",
    "*",
    "_",
    "\\",
    "{",
    "(",
    "\\boxed{",
    "\\boxed{1",
    "\\frac{",
    "\\text{",
    "1,",
    "1/",
    "1e",
    "9",
    "**",
    "^",
    "```",
    "```\n",
    "```python\n",
    "```python\n(\n```\n",
    "x```y\n",
    "~~~\n",
    "'''",
    "@a\n",
    "lambda:",
    "score",
    "Score: 5",
    "5/",
    "out of",
    "<answer>",
    "four",
    "\t",
    "\n",
    "\r",
    ">",
    "- ",
    " ",
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_reader_takes_time_in_proportion_to_the_text(name):
    makers = [
        lambda length, run=run, head=head, end=end: head + run * (length // len(run)) + end
        for run in RUNS
        for head, end in (("", ""), ("Score", "7x"), ("```", "x"), ("#### ", "\nx"), ("\\boxed{", "}"), ("^", "x"))
    ]
    assert slow(FUNCTIONS[name], makers) is None
