"""env=code: which code of a reply is run, against which tests, and what it earns."""

import json

import pytest

from prl.envs.environment import load_taskset
from prl.envs.tasksets.code import code_in, read_tests

SQUARE = [
    "import math",
    "assert f(2) == 4",
    "assert f(3) == 9",
    "assert math.isclose(f(0.5), 0.25)",
    "assert set(g()) == {1, 2}",
]

CHECK = "def check(candidate):\n    assert candidate(2) == 4\n\ncheck(f)"


def tasks(tmp_path, tests=SQUARE, **args):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Square x.", "tests": tests}))
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
    before, after, found = read_tests(
        "import math\nx = f(1)\nassert f(2) == (4, {3, 1}, None), 'why'\nassert 1 < f(3)\nassert f(1) == [x]"
    )
    assert (before, after) == ("import math", "x = f(1)")
    assert found == [("f(2)", (4, {1, 3}, None)), ("bool(1 < f(3))", True), ("bool(f(1) == [x])", True)]


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
        (CHECK, "def f(x): return 2 * x", 1.0),
        (CHECK, "def f(x): return x", 0.0),
        (CHECK, "def f(x): return x\ndef check(candidate): pass", 0.0),
        ("import math\nassert f() == 3", "from __future__ import annotations\ndef f(): return math.floor(3.5)", 1.0),
    ],
)
def test_values_are_equal_as_python_has_it(tmp_path, graded, tests, reply, reward):
    assert graded(tasks(tmp_path, tests)[0], reply).reward == reward


@pytest.mark.parametrize("text", ["a\n```python\nb\n```\n", "```\na\n``` and ```\nb\n```", "```py\nb\n"])
def test_the_last_block_is_the_code(text):
    assert code_in(text).strip() == "b"


@pytest.mark.parametrize("tests", ["f(2) == 4", "assert f(", ["x = 1"]])
def test_tests_that_are_none_are_refused_with_file_line_and_key(tmp_path, tests):
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: key 'tests' must be Python with an assert"):
        tasks(tmp_path, tests)


def test_prls_own_exercises_can_be_solved(graded):
    found = {task.data.prompt: task for task in load_taskset("prl.envs.tasksets.code", {}, "envs.e.args")}
    held_out = list(load_taskset("prl.envs.tasksets.code", {"split": "eval"}, "envs.e.args"))
    assert len(found) + len(held_out) == 207 and not found.keys() & {task.data.prompt for task in held_out}
    task = next(task for prompt, task in found.items() if "read the same backwards" in prompt)
    assert graded(task, "def f(x):\n    x = x.replace(' ', '')\n    return x == x[::-1]").reward == 1.0
