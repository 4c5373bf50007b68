"""alphabet_sort: its grading formula by hand, and its rounds."""

from collections import Counter

import pytest

from prl.config.schema import EnvConfig
from prl.envs.environment import Environment
from prl.envs.tasksets.alphabet_sort import AlphabetSortConfig, AlphabetSortTaskset, grade


def tasks(**args):
    return list(AlphabetSortTaskset(AlphabetSortConfig(**args)))


@pytest.fixture
def task():
    """Two rounds, worked out by hand."""
    data = {"prompt": "sort: ba ca ad", "later": ["add: bb"], "answers": ["ad ba ca", "ad ba bb ca"]}
    return tasks(num_tasks=1)[0].with_data(**data)


@pytest.mark.parametrize("reply", ["ad ba ca", " ad ba ca\n", "ad  ba\tca", "ad\nba\nca"])
def test_exactly_sorted_earns_everything(reply):
    assert grade(reply, "ad ba ca") == 1.0


@pytest.mark.parametrize(
    ("reply", "ratio"),
    [
        ("ad ba", 2 * 2 / 5),
        ("ba ca ad", 2 * 2 / 6),  # ba ca
        ("ad ba ca da", 2 * 3 / 7),
        ("ad ba ca ad ba ca", 2 * 3 / 9),
        ("ad ba ca ad ba ca ad", 0),  # more than twice the answer's words
        ("ad, ba, ca", 2 * 1 / 6),  # ca
        ("adbaca", 0),
        ("AD BA CA", 0),
        ("", 0),
        ("ad " * 10_000, 0),
    ],
)
def test_a_wrong_reply_earns_a_fifth_of_its_similarity(reply, ratio):
    assert grade(reply, "ad ba ca") == pytest.approx(0.2 * ratio)


@pytest.mark.parametrize(
    ("replies", "reward", "correct"),
    [
        (["ad ba ca", "ad ba bb ca"], 1.0, 1.0),
        (["ad ba ca", "ad ba ca"], (1 + 0.2 * 6 / 7) / 2, 0.0),
        (["", "ad ba bb ca"], 0.5, 0.0),
        ([None, None], 0.0, 0.0),
        (["ad ba ca"], 0.5, 0.0),  # no room for the second round
    ],
)
def test_the_reward_is_the_mean_over_the_rounds(task, graded, replies, reward, correct):
    trace = graded(task, *replies)
    assert trace.reward == pytest.approx(reward) and trace.metrics == {"correct": correct}


async def test_rounds_go_on_whatever_the_reply(scripted, task):
    environment = Environment(
        "sort", EnvConfig(taskset="prl.envs.tasksets.alphabet_sort", args={"num_tasks": 3}), eval_tasks=0
    )
    three = task.with_data(later=["add: bb", "add: ab"], answers=["ad ba ca", "ad ba bb ca", "ab ad ba bb ca"])

    async def played(**how):
        sampler = scripted(["ba ca ad", "ad ba bb ca", "nonsense"], **how)
        [rollout] = await environment.play(three, 1, sampler, group_id=0)
        process = [0.2 * 4 / 6 / 3, 1 / 3, 0][: len(rollout.turns)]
        assert [turn.reward for turn in rollout.turns] == pytest.approx(process)
        return [message.content for message in rollout.trace.messages if message.role == "user"], sampler

    async with environment.serving():
        asked, sampler = await played()
        assert asked == ["sort: ba ca ad", "add: bb", "add: ab"]
        [prompts] = sampler.asked.values()
        asked, _ = await played(room=len(prompts[2]) - 1)
        assert asked[:2] == ["sort: ba ca ad", "add: bb"]


def test_answers_follow_from_the_words_of_the_user():
    drawn = tasks(num_tasks=600, seed=3, max_words=4, max_added=2)
    for task in drawn:
        known = []
        assert len(task.data.answers) == 1 + len(task.data.later)
        for message, answer in zip([task.data.prompt, *task.data.later], task.data.answers):
            verb, *words = message.split()
            assert verb == ("add:" if known else "sort:")
            assert len(words) in ((1, 2) if known else (3, 4))
            assert all(2 <= len(word) <= 4 and word.isascii() and word.islower() for word in words)
            known += words
            assert answer.split() == sorted(known)
        assert len(set(known)) == len(known)
    rounds = Counter(len(task.data.answers) for task in drawn)
    assert set(rounds) == {2, 3} and min(rounds.values()) > 240


def test_a_small_space_is_used_up():
    one_word = {"min_letters": 1, "max_letters": 1, "min_words": 1, "max_words": 1, "min_rounds": 1, "max_rounds": 1}
    assert len(tasks(split="train", **one_word)) + len(tasks(split="eval", **one_word)) == 26
