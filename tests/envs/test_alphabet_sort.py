"""alphabet_sort: its grading formula by hand, its rounds, its two splits, its knobs."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from prl.config.schema import EnvConfig
from prl.envs.alphabet_sort import AlphabetSortConfig, AlphabetSortEnv, AlphabetSortTaskset, grade, split_key
from prl.envs.base import held_out
from prl.episodes.environment import Environment


def tasks(**knobs) -> list:
    return list(AlphabetSortTaskset(AlphabetSortConfig(**knobs)))


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
        ("ca ba ad", 2 * 1 / 6),
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
def test_the_reward_is_the_mean_over_the_rounds(task, replies, reward, correct):
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[vf.MessageNode(message=vf.AssistantMessage(content=reply), sampled=True) for reply in replies],
    )
    asyncio.run(task.score(trace))
    assert trace.reward == pytest.approx(reward)
    assert trace.metrics == {"correct": correct}


@pytest.mark.parametrize(("room", "heard"), [(9, [None, "add: bb", "add: ab"]), (2, [None, "add: bb"]), (1, [None])])
async def test_the_rounds_go_on_whatever_the_reply_while_there_is_room(task, room, heard):
    asked = []

    class Talk:
        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

        async def turn(self, message=None):
            asked.append(message)
            return SimpleNamespace(last_reply="nonsense", terminated=len(asked) == room)

    three = task.with_data(later=["add: bb", "add: ab"])
    agents = SimpleNamespace(agent=SimpleNamespace(interaction=lambda task: Talk()))
    await AlphabetSortEnv.run(None, three, agents)
    assert asked == heard


def test_answers_follow_from_what_the_user_says_and_the_numbers_are_as_asked():
    drawn = tasks(num_tasks=600, seed=3, max_words=4, max_added=2)
    for task in drawn:
        known = []
        assert len(task.data.answers) == 1 + len(task.data.later)
        for said, answer in zip([task.data.prompt, *task.data.later], task.data.answers):
            verb, *words = said.split()
            assert verb == ("add:" if known else "sort:")
            assert len(words) in ((1, 2) if known else (3, 4))
            assert all(2 <= len(word) <= 4 and word.isascii() and word.islower() for word in words)
            known += words
            assert answer.split() == sorted(known)
        assert len(set(known)) == len(known)
    rounds = Counter(len(task.data.answers) for task in drawn)
    assert set(rounds) == {2, 3} and min(rounds.values()) > 240


def test_an_episode_is_short():
    """In bytes, all that is said and replied: a byte-level model with a context of 512 plays it."""
    said = [[task.data.prompt, *task.data.later, *task.data.answers] for task in tasks(num_tasks=2000)]
    assert max(sum(map(len, messages)) for messages in said) < 160


def test_no_list_of_words_opens_tasks_of_both_splits_whatever_the_order():
    small = {"min_letters": 1, "max_letters": 1, "min_words": 2, "max_words": 2, "num_tasks": 3000}
    train, held = (
        {frozenset(task.data.prompt.split()[1:]) for seed in (0, 1) for task in tasks(split=split, seed=seed, **small)}
        for split in ("train", "eval")
    )
    assert held and not train & held
    assert len(train | held) == 26 * 25 // 2
    train, held = ({task.key for task in tasks(split=split, num_tasks=2000)} for split in ("train", "eval"))
    assert len(train) == len(held) == 2000 and not train & held


def test_the_split_is_pinned():
    """A changed hash would leak eval tasks into what the committed models were trained on."""
    assert [word for word in "abcdefghijklmnopqrst" if held_out(split_key(["ad", word]))] == ["f", "t"]
    assert split_key(["ad", "f"]) == split_key(["f", "ad"]) == "ad f" and held_out("ad f")


def test_deterministic_by_seed_distinct_and_ends_where_there_are_no_more():
    first = [task.data for task in tasks(num_tasks=500, seed=7)]
    assert first == [task.data for task in tasks(num_tasks=500, seed=7)]
    assert first != [task.data for task in tasks(num_tasks=500, seed=8)]
    assert len({data.id for data in first}) == 500
    one_word = {"min_letters": 1, "max_letters": 1, "min_words": 1, "max_words": 1, "min_rounds": 1, "max_rounds": 1}
    assert len(tasks(split="train", **one_word)) + len(tasks(split="eval", **one_word)) == 26


def test_it_is_played_as_a_conversation():
    config = EnvConfig(taskset="prl.envs.alphabet_sort", args={"num_tasks": 3})
    assert isinstance(Environment("sort", config, eval_tasks=0).verifiers_env, AlphabetSortEnv)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"max_words": 2}, "max_words=2 is below min_words=3"),
        ({"min_rounds": 4}, "max_rounds=3 is below min_rounds=4"),
        ({"min_added": 3}, "max_added=2 is below"),
        ({"max_letters": 1}, "max_letters=1 is below"),
        ({"min_letters": 1, "max_letters": 1, "max_words": 23}, "take 27 different words, and there are 26"),
        ({"min_added": 0}, "min_added"),
        ({"num_tasks": 0}, "num_tasks"),
        ({"split": "test"}, "split"),
        ({"rounds": 5}, "rounds"),
    ],
)
def test_bad_knobs_say_which(knobs, named):
    with pytest.raises(ValueError, match=named):
        tasks(**knobs)
