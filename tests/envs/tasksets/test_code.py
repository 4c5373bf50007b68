"""env=code: which code of a reply is run, against which tests, and what it earns."""

import json
import warnings

import pytest

from prl.envs.environment import load_taskset
from prl.envs.tasksets.code import read_tests

SQUARE = [
    "import math",
    "assert f(2) == 4",
    "assert f(3) == 9",
    "assert math.isclose(f(0.5), 0.25)",
    "assert set(g()) == {1, 2}",
]

CHECK = "def check(candidate):\n    assert candidate(2) == 4\n\ncheck(f)"
COUNTER = "c = f()\nassert c.n == 0\nc.inc()\nassert c.n == 1"
COUNTING = "class f:\n    n = 0\n    def inc(self): self.n += 1"


def tasks(tmp_path, tests=SQUARE, prompt="Write f(x), the square of x, and g.", row=None, **args):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "tests": tests} | (row or {})))
    args = {"path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0, **args}
    return list(load_taskset("prl.envs.tasksets.code", args, "envs.e.args"))


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("```python\ndef f(x): return x * x\ndef g(): return [2, 1, 1]\n```", 1.0),
        ("def f(x): return math.pow(x, 2)\ndef g(): return (1, 2)", 1.0),
        ("First\n```\nf = 1\n```\nNo:\n```py\nf = lambda x: x * x", 0.075),  # cut off, and without g
        ("f = lambda x: 4", 0.025),
        ("I do not know.", 0.0),
        ("", 0.0),
        ("class A:\n  def __eq__(self, other): return True\nf = g = lambda *_: A()", 0.0),
        ("import time\nf = lambda x: x * x if x < 3 else time.sleep(60)", 0.025),
    ],
)
def test_the_share_of_tests_that_hold_is_the_reward(tmp_path, graded, reply, reward):
    [task] = tasks(tmp_path, seconds=2)
    trace = graded(task, reply)
    assert trace.reward == pytest.approx(reward) and trace.metrics == {"correct": float(reward == 1)}


def test_what_is_wanted_stays_here():
    tests = read_tests(
        "import math\nx = f(1)\nassert f(2) == (4, {3, 1}, None), 'why'\nassert 1 < f(3)\nassert f(1) == [x]"
    )
    assert tests.before == "import math"
    assert tests.checks == [
        ("x = f(1)", "f(2)", (4, {1, 3}, None)),
        ("", "bool(1 < f(3))", True),
        ("", "bool(f(1) == [x])", True),
    ]


@pytest.mark.parametrize(
    ("tests", "reply", "reward"),
    [
        ("assert f() == [1, 2]", "def f(): return {1, 2}", 0.0),
        ("assert f() == [1, 2]", "def f(): return iter([1, 2])", 0.0),
        ("assert f() == [1, 2]", "def f(): return (1, 2)", 0.0),
        ("assert f() == b'ab'", "def f(): return b'ba'", 0.0),
        ("assert f() == b'ab'", "def f(): return b'ab'", 1.0),
        ("assert f() == {'1': 1}", "def f(): return {1: 1}", 0.0),
        ("assert f() == [1, 1]", "def f(): return [1.0, True]", 1.0),
        ("x = f(1)\nassert x == 2", "def f(x): return x + 1", 1.0),
        ("x = f(1)\nassert x == 3\nx = f(2)\nassert x == 5", "def f(x): return 2 * x + 1", 1.0),
        ("x = f(1)\nassert x == 3\nx = f(2)\nassert x == 5", "def f(x): return 3", 0.05),
        ("x = [1]\nassert f(x) == 1\nx.append(2)\nassert f(x) == 2", "f = len", 1.0),
        ("x = 1\ny = f(x)\nx = 2\nassert y == 2\ndel x", "def f(x): return x + 1", 1.0),
        (COUNTER, COUNTING, 1.0),
        (COUNTER, COUNTING.replace("1", "2"), 0.05),
        ("assert f(1) == 1\nfor n in range(3): assert f(n) == n", "def f(x): return 1", 0.05),
        ("assert f(1) == 1\nfor n in range(3): assert f(n) == n", "def f(x): return x", 1.0),
        ("assert f(1) == 1\nprint('passed')\nimport math", "def f(x): return 0", 0.0),
        ("assert f(1) == 1\nprint('passed')\nimport math", "def f(x): return math.floor(x)", 1.0),
        (f"{CHECK}\nprint('passed')", "def f(x): return x", 0.0),
        ("import numpy\nassert f() == [7, True]", "def f(): return [numpy.int64(7), numpy.True_]", 1.0),
        ("assert f() == {7: 0.5}", "from decimal import Decimal as D\ndef f(): return {D(7): D('.5')}", 1.0),
        ("assert f() == 0.1", "from decimal import Decimal\ndef f(): return Decimal('.1')", 0.0),
        ("assert f() == 7", "from fractions import Fraction\ndef f(): return Fraction(14, 2)", 1.0),
        (CHECK, "def f(x): return 2 * x", 1.0),
        (CHECK, "def f(x): return x", 0.0),
        (CHECK, "def f(x): return x\ndef check(candidate): pass", 0.0),
        ("import math\nassert f() == 3", "from __future__ import annotations\ndef f(): return math.floor(3.5)", 1.0),
    ],
)
def test_values_are_equal_as_python_has_it(tmp_path, graded, tests, reply, reward):
    assert graded(tasks(tmp_path, tests)[0], reply).reward == reward


HUMAN_EVAL = """import numpy as np

def is_floats(x) -> bool:
    return isinstance(x, float) or isinstance(x, np.ndarray) and x.dtype == np.float64

def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"

def check(candidate):
    inputs = [[2], [0.1], [[1, 2]]]
    results = [4, 0.01, [1, 4]]
    for (inp, exp) in zip(inputs, results):
        assertion(candidate(*inp), exp, 0)
"""
"""The form of HumanEval+'s tests, whose rows name the function apart."""


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("def f(x):\n    return [y * y for y in x] if isinstance(x, list) else x * x", 1.0),
        ("import numpy as np\ndef f(x):\n    return np.square(x).tolist()", 1.0),
        ("def f(x):\n    return x", 0.0),
    ],
)
def test_tests_of_human_evals_form_call_the_rows_entry_point_and_have_numpy(tmp_path, graded, reply, reward):
    [task] = tasks(tmp_path, HUMAN_EVAL, "def f(x):\n    ...", {"entry_point": "f"}, seconds=20)
    assert graded(task, f"```python\n{reply}\n```").reward == reward


@pytest.mark.parametrize(
    ("tests", "prompt", "names"),
    [
        ("assert candidate(3) == 9", "Write f.", "candidate"),
        ("assert f(math.pi) > 9", "Write f.", "math"),
        ("def check(candidate):\n  assert candidate(3) == 9\ncheck(candidate)", "Write f.", "candidate"),
        ("assert f(3) == 9", [{"role": "user", "content": "Square\nx."}], "f"),
    ],
)
def test_tests_that_a_reply_passes_only_by_a_guess_are_warned_of(tmp_path, tests, prompt, names):
    with pytest.warns(UserWarning, match=rf"1 of 1 rows .*: {names} in .*rows\.jsonl, line 1"):
        tasks(tmp_path, tests, prompt)


@pytest.mark.parametrize(
    ("tests", "what"),
    [
        ("import asyncio\nassert asyncio.run(f(3)) == 9", "asyncio.run"),
        ("from tempfile import mkdtemp\nassert f(mkdtemp()) == 9", "tempfile"),
        ("import tempfile\nwith tempfile.TemporaryDirectory() as x: assert f(x) == 9\nassert f(3) == 9", "tempfile"),
    ],
)
def test_tests_of_what_no_code_can_do_here_are_warned_of(tmp_path, tests, what):
    with pytest.warns(UserWarning, match=rf"1 of 1 rows .*: {what} in .*rows\.jsonl, line 1"):
        tasks(tmp_path, tests)


@pytest.mark.parametrize(
    "tests",
    [
        CHECK,
        "import math, os.path\ndef h(n): return math.pi * n\nassert f(h(1)) < 10",
        "from math import *\nassert floor(f(1.5)) == 2",
        "try:\n  import pandas\nexcept ImportError:\n  pandas = None\nassert f(3) == 9",
        "assert [f(n) for n in range(3)] == [0, 1, 4] and (lambda q: f(q))(2) == 4",
        "class T:\n  n = 3\n  def go(self): assert f(self.n) == 9\nT().go()",
        "x, *rest = 1, 2\nwith open('/dev/null') as file:\n  for y in rest: z = y\nassert f(z) == 4",
    ],
)
def test_tests_that_can_be_passed_are_taken_without_a_word(tmp_path, tests):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(tasks(tmp_path, tests, [{"role": "user", "content": "Write\nf."}])) == 1


@pytest.mark.parametrize(
    ("tests", "fault"),
    [
        *(
            (tests, "must be Python with an assert")
            for tests in ("f(2) == 4", "assert f(", ["x = 1"], "return\nassert f")
        ),
        ("assert f(2) == 4\nassert (f(3) == 9, 'wrong')", r"must .* line 2 asserts a tuple"),
        ("def check(c):\n  assert (c(2) == 4, 'wrong')\ncheck(f)", r"must .* line 2 asserts a tuple"),
        ("import pytest\nassert f(2) == pytest.approx(4)", "must not import pytest"),
        ("def check(c):\n  import pandas as pd\n  assert c(2) == 4\ncheck(f)", "must not import pandas"),
        ("from solution.a import f\nassert f(2) == 4", "must not import solution"),
        ("from . import f\nassert f(2) == 4", "must not import"),
    ],
)
def test_tests_that_no_reply_passes_are_refused_with_file_line_and_key(tmp_path, tests, fault):
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 1: key 'tests' {fault}"):
        tasks(tmp_path, tests)


def test_prls_own_exercises_can_be_solved(graded):
    found = {task.data.prompt: task for task in load_taskset("prl.envs.tasksets.code", {}, "envs.e.args")}
    held_out = list(load_taskset("prl.envs.tasksets.code", {"split": "eval"}, "envs.e.args"))
    assert len(found) + len(held_out) == 207 and not found.keys() & {task.data.prompt for task in held_out}
    task = next(task for prompt, task in found.items() if "read the same backwards" in prompt)
    assert graded(task, "def f(x):\n    x = x.replace(' ', '')\n    return x == x[::-1]").reward == 1.0
