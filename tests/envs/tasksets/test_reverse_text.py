"""The reverse_text taskset: its grading formula by hand, and its strings."""

from collections import Counter

import pytest

from prl.envs.tasksets.reverse_text import ReverseTextConfig, ReverseTextTaskset, grade


def tasks(**args):
    return list(ReverseTextTaskset(ReverseTextConfig(**args)))


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("dcba", 1.0),
        (" dcba\n", 1.0),
        ("dcbb", 0.2 * 2 * 3 / 8),  # dcb
        ("dc", 0.2 * 2 * 2 / 6),
        ("abcd", 0.2 * 2 * 1 / 8),  # one letter in order
        ("dcbaa", 0.2 * 2 * 4 / 9),
        ("DCBA", 0),
        ("", 0),
        ("d" * 9, 0),  # over twice the answer's length
        ("dcba" * 2_500, 0),
    ],
)
def test_a_reply_is_graded_by_its_similarity(reply, reward):
    assert grade(reply, "dcba") == pytest.approx(reward)


@pytest.mark.parametrize(("reply", "reward", "correct"), [("dcba", 1.0, 1.0), ("dcbb", 0.15, 0.0), (None, 0.0, 0.0)])
def test_reward_and_metric_are_recorded(graded, reply, reward, correct):
    trace = graded(tasks(num_tasks=1)[0].with_data(answer="dcba"), reply)
    assert trace.reward == pytest.approx(reward) and trace.metrics == {"correct": correct}


def test_answers_follow_from_prompts_and_lengths_are_even():
    drawn = tasks(num_tasks=502, seed=3)
    for task in drawn:
        letters = task.data.prompt.removeprefix("reverse: ")
        assert letters.isalpha() and letters.islower() and letters.isascii()
        assert task.data.answer == letters[::-1] and task.data.system_prompt is None
        assert task.data.demonstration == f"{', '.join(task.data.answer)} -> {task.data.answer}"
    assert Counter(len(task.data.answer) for task in drawn) == {3: 100, 4: 100, 5: 100, 6: 101, 7: 101}


def test_a_length_with_few_strings_gives_what_it_has():
    both = [t.key for split in ("train", "eval") for t in tasks(split=split, min_length=1, max_length=1, num_tasks=99)]
    assert sorted(both) == list("abcdefghijklmnopqrstuvwxyz")
