"""The reverse_text taskset: its grading formula by hand, its two splits, its knobs."""

import asyncio
from collections import Counter

import pytest
import verifiers.v1 as vf

from prl.envs.base import held_out
from prl.envs.reverse_text import ReverseTextConfig, ReverseTextTaskset, grade


def tasks(**knobs) -> list:
    return list(ReverseTextTaskset(ReverseTextConfig(**knobs)))


@pytest.mark.parametrize("reply", ["dcba", " dcba\n"])
def test_exactly_reversed_earns_everything(reply):
    assert grade(reply, "dcba") == 1.0


@pytest.mark.parametrize(
    ("reply", "ratio"),
    [
        ("dcbb", 2 * 3 / 8),  # dcb
        ("dc", 2 * 2 / 6),
        ("abcd", 2 * 1 / 8),  # one letter in order
        ("dcbaa", 2 * 4 / 9),
        ("DCBA", 0),
        ("xyz", 0),
        ("", 0),
        ("   ", 0),
        ("d" * 9, 0),  # over twice the answer's length
        ("dcba" * 2_500, 0),
    ],
)
def test_a_wrong_reply_earns_a_fifth_of_its_similarity(reply, ratio):
    assert grade(reply, "dcba") == pytest.approx(0.2 * ratio)


@pytest.mark.parametrize(("reply", "reward", "correct"), [("dcba", 1.0, 1.0), ("dcbb", 0.15, 0.0), (None, 0.0, 0.0)])
def test_score_records_reward_and_metric(reply, reward, correct):
    task = tasks(num_tasks=1)[0].with_data(answer="dcba")
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[vf.MessageNode(message=vf.AssistantMessage(content=reply), sampled=True)],
    )
    asyncio.run(task.score(trace))
    assert trace.reward == pytest.approx(reward)
    assert trace.metrics == {"correct": correct}


def test_answers_follow_from_prompts_and_lengths_are_even():
    drawn = tasks(num_tasks=502, seed=3)
    for task in drawn:
        assert task.data.prompt == f"reverse: {task.data.id}"
        assert task.data.answer == "".join(reversed(task.data.id))
        assert task.data.id.isalpha() and task.data.id.islower() and task.data.id.isascii()
    assert len(drawn) == 502
    assert Counter(len(t.data.id) for t in drawn) == {3: 100, 4: 100, 5: 100, 6: 101, 7: 101}


def test_a_demonstration_spells_the_answer_and_stays_out_of_the_prompt():
    for task in tasks(num_tasks=300):
        steps, last = task.data.demonstration.split(" -> ")
        spelled = steps.split(", ")
        assert last == task.data.answer
        assert all(len(letter) == 1 for letter in spelled)
        assert [*reversed(spelled)] == [*task.data.id]
        assert task.data.prompt == f"reverse: {task.data.id}"
        assert task.data.system_prompt is None


def test_splits_are_disjoint_whatever_the_seeds():
    train = {t.key for seed in range(3) for t in tasks(split="train", num_tasks=8000, seed=seed, max_length=4)}
    held = {t.key for seed in range(3) for t in tasks(split="eval", num_tasks=1500, seed=seed, max_length=4)}
    assert not train & held


def test_the_split_is_pinned():
    """A changed hash would leak eval strings into what the committed models were trained on."""
    assert [c for c in "abcdefghijklmnopqrstuvwxyz" if held_out(f"xa{c}")] == ["h", "n", "w"]


def test_deterministic_by_seed_and_distinct():
    first = [t.data for t in tasks(num_tasks=500, seed=7)]
    assert first == [t.data for t in tasks(num_tasks=500, seed=7)]
    assert first != [t.data for t in tasks(num_tasks=500, seed=8)]
    assert len({d.id for d in first}) == 500


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"min_length": 0}, "min_length"),
        ({"min_length": 5, "max_length": 4}, "max_length=4 is below min_length=5"),
        ({"num_tasks": 0}, "num_tasks"),
        ({"split": "test"}, "split"),
        ({"num_task": 5}, "num_task"),
    ],
)
def test_bad_knobs_say_which(knobs, named):
    with pytest.raises(ValueError, match=named):
        tasks(**knobs)


def test_a_length_with_few_strings_gives_what_it_has():
    both = [t.key for split in ("train", "eval") for t in tasks(split=split, min_length=1, max_length=1, num_tasks=99)]
    assert sorted(both) == list("abcdefghijklmnopqrstuvwxyz")
