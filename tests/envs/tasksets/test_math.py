"""The math tasksets: grading by hand, worked solutions, and the second try of math_retry."""

import re

import pytest

from prl.config.schema import EnvConfig
from prl.envs.environment import Environment
from prl.envs.tasksets.math import MathConfig, MathTaskset, grade, work_out


def tasks(**args):
    return list(MathTaskset(MathConfig(**args)))


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("46", 46, 1),
        (" 46\n", 46, 1),
        ("0046", 46, 1),
        ("-22", -22, 1),
        ("-0", 0, 1),
        ("56", 46, 0.1 / 2),  # units right
        ("47", 46, 0.1 / 2),  # tens right
        ("64", 46, 0),
        ("146", 46, 0.2 / 3),  # two of the longer's three digits
        ("6", 46, 0.1 / 2),
        ("4", 46, 0),  # aligned from the right, 4 meets 6
        ("196", 176, 0.2 / 3),
        ("-12", -22, 0.1 / 2),
        ("-5", -7, 0),
        ("22", -22, 0),
        ("-46", 46, 0),
    ],
)
def test_an_integer_is_graded_by_its_digits(reply, answer, reward):
    assert grade(reply, answer) == pytest.approx(reward)


@pytest.mark.parametrize(
    "reply", ["", "-", "+46", "４６", "٤٦", "4_6", "4 6", "46.0", "0x2e", "about 46", "6" * 10_000]
)
def test_anything_else_earns_nothing(reply):
    assert grade(reply, 46) == 0.0


@pytest.mark.parametrize(("reply", "reward", "correct"), [("46", 1.0, 1.0), ("56", 0.05, 0.0), (None, 0.0, 0.0)])
def test_reward_and_metric_are_recorded(graded, reply, reward, correct):
    trace = graded(tasks(num_tasks=1)[0].with_data(answer=46), reply)
    assert trace.reward == pytest.approx(reward) and trace.metrics == {"correct": correct}


@pytest.mark.parametrize(
    ("problem", "demonstration"),
    [
        ((47, "+", 85), "47+85 = (40+80) + (7+5) = 120 + 12 = 132"),
        ((47, "-", 85), "47-85 = (40-80) + (7-5) = -40 + 2 = -38"),
        ((47, "*", 85), "47*85 = (40*85) + (7*85) = 3400 + 595 = 3995"),
        ((1204, "+", 7), "1204+7 = (1200+0) + (4+7) = 1200 + 11 = 1211"),
    ],
)
def test_worked_solutions_by_hand(problem, demonstration):
    assert work_out(*problem) == demonstration


@pytest.mark.parametrize("max_operand", [9, 99, 12_345])
def test_answers_and_demonstrations_follow_from_prompts(max_operand):
    """Python works each side of each equals sign out by itself."""
    for task in tasks(num_tasks=300, operations=("+", "-", "*"), max_operand=max_operand, seed=3):
        first, *steps, last = task.data.demonstration.split(" = ")
        assert task.data.prompt == f"{first}=" and task.data.system_prompt is None
        assert int(last) == task.data.answer
        assert all(0 <= int(operand) <= max_operand for operand in re.split(r"[-+*]", first))
        for side in (first, *steps):
            assert re.fullmatch(r"[-0-9+* ()]+", side)
            assert eval(side) == task.data.answer


def test_both_splits_together_are_every_problem():
    keys = [task.key for split in ("train", "eval") for task in tasks(split=split, max_operand=9, num_tasks=10_000)]
    assert len(keys) == len(set(keys)) == 2 * 10 * 10


@pytest.mark.parametrize(
    ("replies", "messages", "reward", "at_once"),
    [
        (["46"], ["12+34="], 1.0, 1.0),
        (["45", "46"], ["12+34=", "No: 12+34=46. Once more: 12+34="], 0.5, 0.0),
        (["45", "56"], ["12+34=", "No: 12+34=46. Once more: 12+34="], 0.025, 0.0),
    ],
)
async def test_a_second_try_is_worth_half(scripted, replies, messages, reward, at_once):
    environment = Environment(
        "retry", EnvConfig(taskset="prl.envs.tasksets.math_retry", args={"num_tasks": 3}), eval_tasks=0
    )
    task = environment.tasks[0].with_data(prompt="12+34=", answer=46)
    async with environment.serving():
        [rollout] = await environment.play(task, 1, scripted(replies), group_id=0)
    assert [message.content for message in rollout.trace.messages if message.role == "user"] == messages
    assert rollout.reward == pytest.approx(reward) and rollout.metrics["correct_at_once"] == at_once
