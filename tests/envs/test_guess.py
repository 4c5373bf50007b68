"""guess: what the user says, how many guesses there are, and that they suffice."""

import asyncio
import tracemalloc

import pytest
import verifiers.v1 as vf

from prl.config.schema import EnvConfig
from prl.envs.base import held_out
from prl.envs.guess import GuessConfig, GuessEnv, GuessTaskset, answer
from prl.episodes.environment import Environment


def tasks(**knobs):
    return list(GuessTaskset(GuessConfig(**knobs)))


def everything(**knobs):
    return [task for split in ("train", "eval") for task in tasks(split=split, num_tasks=100_000, **knobs)]


@pytest.mark.parametrize(
    ("guess", "said"),
    [
        ("7", None),
        (" 7\n", None),
        ("007", None),
        ("6", "higher"),
        ("8", "lower"),
        ("-7", "higher"),
        ("100", "lower"),
        ("", "a number"),
        ("seven", "a number"),
        ("7.0", "a number"),
        ("7!", "a number"),
        ("I say 7", "a number"),
        ("+7", "a number"),
        ("7 7", "a number"),
        ("٧", "a number"),
        ("1_0", "a number"),
        ("9" * 9, "lower"),
        ("9" * 10, "a number"),
        ("1" * 10_000, "a number"),
    ],
)
def test_what_the_user_says_to_a_guess(guess, said):
    assert answer(guess, 7) == said


class Talk:
    """A player: `player(said)` is the next guess, an end where it is None."""

    def __init__(self, player):
        self.player, self.guesses, self.heard = player, [], []

    async def turn(self, message=None):
        self.heard.append(message)
        guess = self.player(message)
        if guess is None:
            return vf.Segment(messages=[], terminated=True)
        self.guesses.append(guess)
        return vf.Segment(messages=[vf.AssistantMessage(content=guess)])

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


async def play(task, player):
    """The guesses of an episode, what the player heard, and its reward."""
    talk = Talk(player)
    agents = type("Agents", (), {"agent": type("Agent", (), {"interaction": staticmethod(lambda task: talk)})})
    await GuessEnv.run(None, task, agents)
    last = type("Trace", (), {"last_reply": talk.guesses[-1] if talk.guesses else ""})
    return talk.guesses, talk.heard, await task.found(last)


def bisecting(n):
    low, high, last = 1, n, None

    def player(said):
        nonlocal low, high, last
        low, high = (last + 1, high) if said == "higher" else (low, last - 1) if said == "lower" else (low, high)
        last = (low + high) // 2
        return str(last)

    return player


async def test_bisection_finds_every_secret_of_every_range_and_a_guess_less_would_not_do():
    most = {}
    for task in everything(min_size=2, max_size=70):
        n = int(task.data.prompt.removeprefix("1-"))
        guesses, _, reward = await play(task, bisecting(n))
        assert reward == 1.0 and len(guesses) <= task.data.guesses
        most[n] = max(most.get(n, 0), len(guesses))
    assert len(most) == 69
    for n, needed in most.items():
        assert needed == next(k for k in range(1, 9) if 2**k > n), "2**k - 1 numbers can be told apart by k guesses"


@pytest.mark.parametrize(("slack", "guesses"), [(0, 5), (3, 8)])
async def test_no_more_guesses_are_allowed_than_bisection_and_slack(slack, guesses):
    task = next(task for task in everything(min_size=20, max_size=20, slack=slack) if task.data.secret == 13)
    made, heard, reward = await play(task, lambda said: "1")
    assert made == ["1"] * guesses and heard == [None] + ["higher"] * (guesses - 1) and reward == 0.0


async def test_a_wasted_guess_counts_and_is_told():
    task = next(task for task in everything(min_size=20, max_size=20) if task.data.secret == 13)
    script = {None: "one", "a number": "20", "lower": "13"}
    made, heard, reward = await play(task, lambda said: script[said])
    assert (made, heard, reward) == (["one", "20", "13"], [None, "a number", "lower"], 1.0)


@pytest.mark.parametrize("before", [0, 2])
async def test_a_conversation_that_is_over_is_not_talked_to(before):
    task = next(task for task in everything(min_size=20, max_size=20) if task.data.secret == 13)
    script = iter(["1"] * before + [None])
    made, heard, reward = await play(task, lambda said: next(script))
    assert len(made) == before and len(heard) == before + 1 and reward == 0.0


def test_the_tasks_are_every_range_with_every_secret():
    drawn = everything(min_size=3, max_size=6)
    assert sorted((task.data.prompt, task.data.secret) for task in drawn) == sorted(
        (f"1-{n}", secret) for n in range(3, 7) for secret in range(1, n + 1)
    )
    assert {task.data.prompt: task.data.guesses for task in drawn} == {"1-3": 2, "1-4": 3, "1-5": 3, "1-6": 3}
    assert len({task.key for task in drawn}) == len(drawn)


def test_splits_share_no_pair_whatever_the_seeds_and_are_pinned():
    train, held = (
        {task.key for seed in range(3) for task in tasks(split=split, seed=seed)} for split in ("train", "eval")
    )
    assert train and held and not train & held
    assert [key for n in (20, 30) for s in range(1, n + 1) if held_out(key := f"1-{n}: {s}")] == ["1-20: 17"]


def test_the_same_seed_draws_the_same_pairs():
    first, second, other = ([task.key for task in tasks(num_tasks=40, seed=seed)] for seed in (5, 5, 6))
    assert len(first) == 40 and first == second != other


def test_no_more_pairs_are_held_than_are_drawn():
    tracemalloc.start()
    try:
        tasks(num_tasks=10, max_size=1500)  # of 1.1 million
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    drawn = tasks(num_tasks=300, max_size=999_999_999, split="eval")
    assert len({task.key for task in drawn}) == 300
    assert all(task.key == f"{task.data.prompt}: {task.data.secret}" and held_out(task.key) for task in drawn)
    assert all(1 <= task.data.secret <= int(task.data.prompt.removeprefix("1-")) for task in drawn)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_split_that_holds_enough_is_drawn_from_until_there_are_enough(split):
    assert len({task.key for task in tasks(split=split, num_tasks=1900, max_size=200)}) == 1900


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"min_size": 1}, "min_size"),
        ({"min_size": 9, "max_size": 8}, "max_size=8 is below min_size=9"),
        ({"max_size": 1_000_000_000}, "max_size"),
        ({"slack": -1}, "slack"),
        ({"num_tasks": 0}, "num_tasks"),
    ],
)
def test_bad_knobs_say_which(knobs, named):
    with pytest.raises(ValueError, match=named):
        tasks(**knobs)


async def test_it_is_played_as_one_conversation_and_graded_on_its_last_guess(scripted):
    environment = Environment(
        "guess", EnvConfig(taskset="prl.envs.guess", args={"min_size": 20, "max_size": 20}), eval_tasks=0
    )
    task = environment.tasks[0].with_data(secret=12)
    scripts = {"0": ["10", "15", "12"], "1": ["10", "ten", "11", "13", "14"]}
    sampler = scripted(lambda conversation, turn: scripts[conversation.split("/")[3]][turn])
    async with environment.serving():
        won, lost = [rollout async for rollout in environment.play(task, 2, sampler, group_id=0)]
    assert [m.content for m in won.trace.messages] == ["1-20", "10", "higher", "15", "lower", "12"]
    assert lost.trace.messages[4].content == "a number" and lost.num_turns == 5
    assert (won.reward, lost.reward) == (1.0, 0.0) and won.metrics == {"guesses": 3.0}
    assert not won.error and not lost.error and len(won.samples) == len(lost.samples) == 1


async def test_guesses_past_the_context_are_not_made(scripted):
    environment = Environment(
        "guess", EnvConfig(taskset="prl.envs.guess", args={"min_size": 20, "max_size": 20}), eval_tasks=0
    )
    task = environment.tasks[0].with_data(secret=12)
    async with environment.serving():
        whole = scripted(["1"] * 5)
        assert len([rollout async for rollout in environment.play(task, 1, whole, group_id=0)]) == 1
        (prompts,) = whole.asked.values()
        short = scripted(["1"] * 5, room=len(prompts[3]) - 1)
        (rollout,) = [rollout async for rollout in environment.play(task, 1, short, group_id=0)]
    assert rollout.error is None and rollout.num_turns == 3 and rollout.reward == 0.0
    assert rollout.trace.stop_condition == "context_length"


def test_nobody_who_was_not_asked_has_found_anything():
    task = tasks(num_tasks=1)[0]
    trace = vf.Trace(task=vf.TraceTask(type="GuessTask", data=task.data), agent=vf.AgentInfo(config=vf.AgentConfig()))
    asyncio.run(task.score(trace))
    assert trace.reward == 0.0
