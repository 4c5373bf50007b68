"""calculator: the value of an expression, the tasks, and what is said of a call that it cannot do."""

import contextlib
import json
import random

import pytest
import verifiers.v1 as vf

from prl.config.schema import EnvConfig
from prl.envs.environment import Environment
from prl.envs.tasksets.calculator import CalculatorConfig, CalculatorTaskset, compute


def tasks(**options):
    return list(CalculatorTaskset(CalculatorConfig(**options)))


def call(expression):
    return f"<tool_call>\n{json.dumps({'name': 'calculate', 'arguments': {'expression': expression}})}\n</tool_call>"


# --- expressions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("10-4-3", 3),
        ("10-(4-3)", 9),
        ("-3*-4", 12),
        ("--5", 5),
        ("-(2+3)", -5),
        (" 1 + 2 ", 3),
        ("37*48-512", 1264),
        ("9" * 50 + "*10", int("9" * 50 + "0")),
        ("(" * 49 + "1" + ")" * 49, 1),
    ],
)
def test_an_expression_is_worth_what_it_says(expression, value):
    assert compute(expression) == value


NO_EXPRESSIONS = """2**3 7//2 7/2 7%2 x x+1 1.0 1e3 1j True None ~1 +1 1<2 abs(1) (1).real [1] (1,) '1' "a"*9 1+ (1 1)
    1;2 a:=1 é ٣ () ... f'{1}' __import__('os') 0x10 0b11 1_0 1+2#3 # １+2 01"""


@pytest.mark.parametrize(
    "expression",
    [
        *NO_EXPRESSIONS.split(),
        "",
        " ",
        "not 1",
        "1 2",
        "1\n2",
        "1\t+2",
        "1+\0",
        "\ud800",
        "1" * 101,
        "1+" * 50 + "1",
        "(" * 100,
    ],
)
def test_what_is_none_is_refused(expression):
    with pytest.raises(ValueError):
        compute(expression)


@pytest.mark.filterwarnings("ignore")  # of Python's, about numbers that run into words
def test_no_text_makes_it_raise_anything_else():
    rng = random.Random(0)
    pieces = [*"0123456789+-*()/.,:;=<>!%&|^~@#'\"\\[]{} \n\t\0é", "**", "//", "1or", "0x", "True", "\ud800", "f'", "x"]
    for _ in range(5_000):
        with contextlib.suppress(ValueError):
            assert type(compute("".join(rng.choices(pieces, k=rng.randint(0, 40))))) is int


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_a_task_asks_for_the_value_of_its_problem():
    drawn = tasks(num_tasks=300, seed=3, operands=4, max_operand=12)
    assert len(drawn) == len({task.key for task in drawn}) == 300
    for task in drawn:
        numbers = [int(number) for number in task.key.replace("-", "+").replace("*", "+").split("+")]
        assert len(numbers) == 4 and all(0 <= number <= 12 for number in numbers)
        assert task.data.prompt == f"{task.key}=" and task.data.answer == compute(task.key)
    assert {sign for task in drawn for sign in task.key if not sign.isdigit()} == set("+-*")


@pytest.mark.parametrize(
    ("replies", "reward", "correct", "calls"),
    [
        (["46"], 1.0, 1.0, 0),
        ([1, "46"], 1.0, 1.0, 1),
        ([2, "56"], 0.05, 0.0, 2),
        (["about 46"], 0.0, 0.0, 0),
        ([1], 0.0, 0.0, 1),
        (["46", 1], 0.0, 0.0, 1),
    ],
)
def test_the_last_reply_counts(graded, replies, reward, correct, calls):
    task = tasks(num_tasks=1)[0].with_data(answer=46)
    made = vf.ToolCall(id="c", name="calculate", arguments="{}")
    calling = [vf.AssistantMessage(content="", tool_calls=[made] * n) if isinstance(n, int) else n for n in replies]
    trace = graded(task, *calling)
    assert trace.reward == pytest.approx(reward) and trace.metrics == {"correct": correct, "tool_calls": calls}


# --- played -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def play(scripted):
    environment = Environment(
        "calculator", EnvConfig(taskset="prl.envs.tasksets.calculator", args={"num_tasks": 3}), eval_tasks=0
    )

    async def one(script, problem="37*48-512", answer=1264):
        task = environment.tasks[0].with_data(id=problem, prompt=f"{problem}=", answer=answer)
        (rollout,) = await environment.play(task, 1, scripted(script), group_id=0)
        return rollout

    async with environment.serving():
        yield one


async def test_what_the_calculator_cannot_do_it_says(play):
    rollout = await play([call("2**9"), call("9" * 200), "0"])
    answers = [message.content for message in rollout.trace.messages if message.role == "tool"]
    assert answers == [
        "error: only integers, +, -, * and parentheses",
        "error: an expression has at most 100 characters",
    ]
    assert rollout.error is None and rollout.reward == 0.0


async def test_who_only_calls_earns_nothing_and_is_stopped(play):
    rollout = await play([call("37*48-512")] * 9)
    assert rollout.error is None and rollout.trace.num_turns == 4 and rollout.reward == 0.0
    assert rollout.trace.stop_condition == "max_turns"
