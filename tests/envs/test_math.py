"""The math taskset: its grading formula by hand, its two splits, its knobs."""

import asyncio
import re

import pytest
import verifiers.v1 as vf

from prl.envs.base import held_out
from prl.envs.math import MathConfig, MathTaskset, grade, work_out


def tasks(**knobs) -> list:
    return list(MathTaskset(MathConfig(**knobs)))


def replied(task: vf.Task, reply: str | None) -> vf.Trace:
    """The smallest trace that can be scored: one assistant message."""
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[vf.MessageNode(message=vf.AssistantMessage(content=reply), sampled=True)],
    )


@pytest.mark.parametrize("reply", ["46", " 46\n", "046", "0046"])
def test_the_right_integer_earns_everything(reply):
    assert grade(reply, 46) == 1.0


@pytest.mark.parametrize(
    ("reply", "answer", "share"),
    [
        ("56", 46, 1 / 2),  # units right
        ("47", 46, 1 / 2),  # tens right
        ("64", 46, 0),
        ("146", 46, 2 / 3),  # two of the longer's three digits
        ("6", 46, 1 / 2),
        ("4", 46, 0),  # aligned from the right, 4 meets 6
        ("196", 176, 2 / 3),
        ("-12", -22, 1 / 2),
        ("-5", -7, 0),
    ],
)
def test_a_wrong_integer_earns_a_tenth_of_its_right_digits(reply, answer, share):
    assert grade(reply, answer) == pytest.approx(0.1 * share)


@pytest.mark.parametrize(
    "reply",
    ["", " ", "-", "+46", "４６", "٤٦", "4_6", "4 6", "46.0", "0x2e", "12+34", "46=", "about 46", "-46", "6" * 10_000],
)
def test_anything_else_earns_nothing(reply):
    assert grade(reply, 46) == 0.0


def test_negative_answers_and_zero():
    assert grade("-22", -22) == 1.0
    assert grade("- 22", -22) == 0.0
    assert grade("22", -22) == 0.0
    assert grade("0", 0) == grade("-0", 0) == 1.0
    assert grade("+5", 5) == grade("５", 5) == 0.0


@pytest.mark.parametrize(("reply", "reward", "correct"), [("{answer}", 1.0, 1.0), ("x", 0.0, 0.0), (None, 0.0, 0.0)])
def test_score_records_reward_and_metric(reply, reward, correct):
    (task,) = tasks(num_tasks=1)
    trace = replied(task, reply and reply.format(answer=task.data.answer))
    asyncio.run(task.score(trace))
    assert trace.reward == reward
    assert trace.metrics == {"correct": correct}


def test_partial_credit_reaches_the_trace_but_not_the_metric():
    task = tasks(num_tasks=1)[0].with_data(answer=46)
    trace = replied(task, "56")
    asyncio.run(task.score(trace))
    assert trace.reward == pytest.approx(0.05)
    assert trace.metrics == {"correct": 0.0}


def parse(problem: str) -> tuple[int, str, int]:
    sign = next(sign for sign in "+-*" if sign in problem)
    left, right = problem.split(sign)
    return int(left), sign, int(right)


def test_answers_follow_from_prompts():
    for task in tasks(num_tasks=300, operations=("+", "-", "*"), seed=3):
        left, operation, right = parse(task.data.id)
        assert task.data.prompt == task.data.id + "="
        assert task.data.answer == {"+": left + right, "-": left - right, "*": left * right}[operation]
        assert 0 <= left <= 99 and 0 <= right <= 99


@pytest.mark.parametrize(
    ("problem", "demonstration"),
    [
        ((47, "+", 85), "47+85 = (40+80) + (7+5) = 120 + 12 = 132"),
        ((47, "-", 85), "47-85 = (40-80) + (7-5) = -40 + 2 = -38"),
        ((47, "*", 85), "47*85 = (40*85) + (7*85) = 3400 + 595 = 3995"),
        ((3, "-", 15), "3-15 = (0-10) + (3-5) = -10 + -2 = -12"),
        ((1204, "+", 7), "1204+7 = (1200+0) + (4+7) = 1200 + 11 = 1211"),
    ],
)
def test_worked_solutions_by_hand(problem, demonstration):
    assert work_out(*problem) == demonstration


@pytest.mark.parametrize("max_operand", [9, 99, 12_345])
def test_every_line_of_a_demonstration_is_the_answer(max_operand):
    """Python works each side of each equals sign out by itself."""
    for task in tasks(num_tasks=300, operations=("+", "-", "*"), max_operand=max_operand):
        first, *steps, last = task.data.demonstration.split(" = ")
        assert first == task.data.id
        assert int(last) == task.data.answer
        for side in (first, *steps):
            assert re.fullmatch(r"[-0-9+* ()]+", side)
            assert eval(side) == task.data.answer


def test_a_demonstration_stays_out_of_the_prompt():
    for task in tasks(num_tasks=300, operations=("+", "-", "*")):
        assert task.data.prompt == task.data.id + "="
        assert task.data.system_prompt is None


def test_splits_are_disjoint_whatever_the_seeds_and_cover_everything():
    train = {t.key for t in tasks(split="train", max_operand=9, num_tasks=10_000, seed=1)}
    held = {t.key for t in tasks(split="eval", max_operand=9, num_tasks=10_000, seed=2)}
    assert not train & held
    assert len(train | held) == 2 * 10 * 10
    train = {t.key for seed in range(3) for t in tasks(split="train", num_tasks=5000, seed=seed)}
    held = {t.key for seed in range(3) for t in tasks(split="eval", num_tasks=1000, seed=seed)}
    assert not train & held


def test_the_split_is_pinned():
    """A changed hash would leak eval problems into what the committed models were trained on."""
    assert [b for b in range(40) if held_out(f"7+{b}")] == [12, 17, 19, 22, 30, 34]


def test_deterministic_by_seed_and_distinct():
    first = [t.data for t in tasks(num_tasks=500, seed=7)]
    assert first == [t.data for t in tasks(num_tasks=500, seed=7)]
    assert first != [t.data for t in tasks(num_tasks=500, seed=8)]
    assert len({d.id for d in first}) == 500


def test_a_task_keeps_its_key_across_seeds():
    keys = [{t.data.id: t.key for t in tasks(max_operand=9, num_tasks=100, seed=seed)} for seed in (0, 1)]
    shared = keys[0].keys() & keys[1].keys()
    assert shared and all(keys[0][k] == keys[1][k] for k in shared)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"operations": ("/",)}, "operations"),
        ({"operations": ()}, "operations"),
        ({"operations": ("+", "+")}, "repeats an entry"),
        ({"max_operand": 0}, "max_operand"),
        ({"num_tasks": 0}, "num_tasks"),
        ({"split": "test"}, "split"),
        ({"num_task": 5}, "num_task"),
    ],
)
def test_bad_knobs_say_which(knobs, named):
    with pytest.raises(ValueError, match=named):
        tasks(**knobs)
