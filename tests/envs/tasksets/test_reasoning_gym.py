"""reasoning_gym: every generator of the package, what of a reply reaches its scorer, the two splits, the options."""

import functools
import itertools
import json
import math
import random
import time

import pytest
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from prl.envs.tasksets.reasoning_gym import EXACT, REFUSED, ReasoningGymConfig, ReasoningGymTaskset, grade, tagged

ADDITION = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}
# Generators without an answer: the key of the metadata that holds a right one, or why there is none.
CHECKED = {
    "graph_color": "possible_answer",
    "rubiks_cube": "example_correct_answer",
    "propositional_logic": None,  # its example need not follow from the premises
    "boxnet": None,  # no plan comes with the question
    "rush_hour": None,  # nor do moves
}


def tasks(**options) -> list:
    return list(ReasoningGymTaskset(ReasoningGymConfig(**options)))


NAMES = sorted(DATASETS.keys() - REFUSED.keys())


@functools.cache
def task_of(name):
    (task,) = tasks(dataset=name, num_tasks=1)
    return task


@pytest.fixture(scope="module")
def entries():
    """Generator name -> its dataset and one entry."""
    return {name: task_of(name)._graded_by[1:] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_generator_gives_tasks_that_its_own_answer_solves(name, graded):
    task = task_of(name)
    assert task.data.prompt and task.key.startswith(f"{name}/")
    answer = task.data.answer
    assert (answer is None) == (name in CHECKED)
    if answer is None:
        key = CHECKED[name]
        if key is None:
            return
        answer = task._graded_by[2]["metadata"][key]
        if not isinstance(answer, str):  # a mapping of vertices, as JSON
            answer = json.dumps(answer)
    for reply in (answer, f"Hm. <answer>no</answer> Rather:\n<answer>\n{answer}\n</answer>"):
        trace = graded(task, reply)
        assert trace.reward > 0.99 and trace.metrics == {"correct": 1.0}


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("142*2=284", "284", 1.0),
        ("285 or 284", "284", 1.0),
        ("284, no: 285", "284", 0.0),
        ("-1", "-1", 1.0),
        ("", "1", 0.0),
    ],
)
def test_word_problems_are_graded_by_the_last_number(reply, answer, reward):
    assert grade(reply, "gsm_symbolic", None, {"answer": answer}) == reward


def test_what_is_graded_is_what_the_package_extracts():
    rng = random.Random(0)
    pieces = ["<answer>", "</answer>", "<answer", "</", "answer>", "<", " ", "\n", "\x1c", "\xa0", "a", "é"]
    replies = ["".join(rng.choices(pieces, k=rng.randrange(12), weights=[4, 4] + [1] * 10)) for _ in range(20_000)]
    assert sum(tagged(reply) is not None for reply in replies) > 5000
    for reply in [*replies, "<answer>" * 500, "<answer>" * 500 + "</answer>" * 500]:
        assert tagged(reply) == extract_answer(reply), reply


def test_a_reply_is_graded_once_for_reward_and_metric(monkeypatch, graded):
    task, other = tasks(num_tasks=2)
    scored = []
    for each in (task, other):
        monkeypatch.setattr(each._graded_by[1], "score_answer", lambda answer, entry: scored.append(answer) or 0.5)
    assert [graded(task, "1").reward, graded(task, "2").reward, graded(other, "2").reward] == [0.5, 0.5, 0.5]
    assert scored == ["1", "2", "2"]


WORDS = """nonsense 0 nan nan+nanj inf [NaN] 1e400 1e999999999 R9999999 (RU)99999999 null [[]] {} 9**9**9**9 1/0 é٣
    __import__('os').abort() [__import__('os').abort()] exit() ().__class__"""
NASTY = [*WORDS.split(), "", "\0", "9" * 5000, "-" * 5000, "(" * 3000, "[" * 5000, "¬" * 2000, "(9*9)*" * 500 + "9"]


def test_hostile_reply_is_neither_run_nor_rewarded(entries):
    """Any reply at all has a reward in [0, 1], soon, and a wrong one never all of it."""
    for (name, (dataset, entry)), reply in itertools.product(entries.items(), NASTY):
        if reply == entry["answer"]:
            continue
        started = time.process_time()
        reward = grade(reply, name, dataset, entry)
        assert math.isfinite(reward) and 0.0 <= reward < 1.0, (name, reply[:40], reward)
        assert time.process_time() - started < 0.5, (name, reply[:40])


@pytest.mark.parametrize("name", ["binary_matrix", "spiral_matrix", "n_queens", "string_insertion", "countdown"])
def test_what_would_be_evaluated_is_not_handed_on(name, entries, monkeypatch):
    dataset, entry = entries[name]
    seen = []
    monkeypatch.setattr(dataset, "score_answer", lambda answer, entry: seen.append(answer) or 1.0)
    assert grade("print(1)", name, dataset, entry) == grade("[x for x in Q]", name, dataset, entry) == 0.0
    assert grade("1 .real", name, dataset, entry) == grade("9**9", name, dataset, entry) == 0.0
    assert seen == []
    assert grade(entry["answer"], name, dataset, entry) == 1.0
    assert seen == [entry["answer"]]


@pytest.mark.parametrize("name", sorted(EXACT))
def test_unfit_scorer_is_replaced_by_the_exact_answer(name, entries):
    dataset, entry = entries[name]
    assert grade(f" {entry['answer']}\n", name, dataset, entry) == 1.0
    assert grade(entry["answer"] + "1", name, dataset, entry) == grade("0", name, dataset, entry) == 0.0


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("46", 1),
        ("046.0", 1),
        ("46!", 2 / 3),
        ("about 46", 1 / 4),
        ("47", 0),
        ("<answer>46</answer>", 1),
        ("46 <answer>47</answer>", 0),
    ],
)
def test_chain_sum_grades_as_documented(reply, reward, entries):
    dataset, entry = entries["chain_sum"]
    assert grade(reply, "chain_sum", dataset, entry | {"answer": "46"}) == pytest.approx(reward)


@pytest.mark.parametrize(("returned", "reward"), [(math.nan, 0), (math.inf, 0), (-1, 0), (1.5, 1), (0.25, 0.25)])
def test_a_reward_out_of_range_is_brought_back(returned, reward, entries, monkeypatch):
    dataset, entry = entries["gcd"]
    monkeypatch.setattr(dataset, "score_answer", lambda answer, entry: returned)
    assert grade("3", "gcd", dataset, entry) == reward


def test_a_scorer_cannot_change_the_task(entries, monkeypatch):
    dataset, entry = entries["gcd"]
    before = repr(entry)
    monkeypatch.setattr(dataset, "score_answer", lambda answer, entry: entry["metadata"].clear() or 1.0)
    grade("3", "gcd", dataset, entry)
    assert repr(entry) == before


def test_an_empty_message_is_a_wrong_reply(graded):
    trace = graded(tasks(num_tasks=1)[0], None)
    assert trace.reward == 0.0 and trace.metrics == {"correct": 0.0}


def test_settings_reach_the_generator_and_those_of_others_wait():
    settings = ADDITION | {"gcd": {"max_numbers": 3}}
    for task in tasks(num_tasks=300, config=settings):
        left, sign, right = task.data.prompt.removesuffix(" =").rsplit(": ", 1)[1].split()
        assert 0 <= int(left) <= 99 and 0 <= int(right) <= 99
        assert int(task.data.answer) == {"+": int(left) + int(right), "-": int(left) - int(right)}[sign]
    assert {len(task.data.prompt) for task in tasks(num_tasks=50)} != {
        len(task.data.prompt) for task in tasks(num_tasks=50, config=settings)
    }


def test_splits_are_disjoint_whatever_the_seeds():
    digits = {"chain_sum": ADDITION["chain_sum"] | {"max_digits": 1}}
    train = {task.data.prompt for task in tasks(split="train", num_tasks=5000, seed=1, config=digits)}
    held = {task.data.prompt for task in tasks(split="eval", num_tasks=5000, seed=2, config=digits)}
    assert not train & held
    assert len(train | held) == 2 * 10 * 10


def test_near_seeds_share_little():
    first = [task.data for task in tasks(num_tasks=700, seed=7, dataset="word_sorting")]
    assert len({data.id for data in first}) == 700
    next_one = {task.data.id for task in tasks(num_tasks=700, seed=8, dataset="word_sorting")}
    assert not next_one & {data.id for data in first}
