"""guess: what the user says, how many guesses there are, and that they suffice."""

import pytest
import verifiers.v1 as vf

from prl.config.schema import EnvConfig
from prl.envs.environment import Environment
from prl.envs.tasksets.guess import GuessConfig, GuessEnv, GuessTaskset, answer


def tasks(**args):
    return list(GuessTaskset(GuessConfig(**args)))


def everything(**args):
    return [task for split in ("train", "eval") for task in tasks(split=split, num_tasks=100_000, **args)]


@pytest.mark.parametrize(
    ("guesses", "reply"),
    [
        (["7", " 7\n", "007"], None),
        (["6", "-7"], "higher"),
        (["8", "100", "9" * 9], "lower"),
        (["", "seven", "7.0", "7!", "I say 7", "+7", "7 7", "٧", "1_0", "9" * 10, "1" * 10_000], "a number"),
    ],
)
def test_what_the_user_says_to_a_guess(guesses, reply):
    assert {answer(guess, 7) for guess in guesses} == {reply}


class Talk:
    """A player: `player(message)` is the next guess, an end where it is None."""

    def __init__(self, player):
        self.player, self.guesses, self.messages = player, [], []

    async def turn(self, message=None):
        self.messages.append(message)
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
    """The guesses of an episode, the messages of the user, and its reward."""
    talk = Talk(player)
    agents = type("Agents", (), {"agent": type("Agent", (), {"interaction": staticmethod(lambda task: talk)})})
    await GuessEnv.run(None, task, agents)
    last = type("Trace", (), {"last_reply": talk.guesses[-1] if talk.guesses else ""})
    return talk.guesses, talk.messages, await task.found(last)


def bisecting(n):
    low, high, last = 1, n, None

    def player(message):
        nonlocal low, high, last
        if message == "higher":
            low = last + 1
        elif message == "lower":
            high = last - 1
        last = (low + high) // 2
        return str(last)

    return player


async def test_bisection_needs_exactly_the_guesses_that_there_are():
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
    made, messages, reward = await play(task, lambda message: "1")
    assert made == ["1"] * guesses and messages == [None] + ["higher"] * (guesses - 1) and reward == 0.0


@pytest.mark.parametrize("before", [0, 2])
async def test_a_conversation_that_is_over_is_not_talked_to(before):
    task = next(task for task in everything(min_size=20, max_size=20) if task.data.secret == 13)
    script = iter(["1"] * before + [None])
    made, messages, reward = await play(task, lambda message: next(script))
    assert len(made) == before and len(messages) == before + 1 and reward == 0.0


def test_the_tasks_are_every_range_with_every_secret():
    drawn = everything(min_size=3, max_size=6)
    pairs = [(f"1-{n}", secret) for n in range(3, 7) for secret in range(1, n + 1)]
    assert sorted((task.data.prompt, task.data.secret) for task in drawn) == sorted(pairs)
    assert {task.data.prompt: task.data.guesses for task in drawn} == {"1-3": 2, "1-4": 3, "1-5": 3, "1-6": 3}


async def test_game_is_graded_on_its_last_guess(scripted):
    config = EnvConfig(taskset="prl.envs.tasksets.guess", args={"min_size": 20, "max_size": 20})
    environment = Environment("guess", config, eval_tasks=0)
    task = environment.tasks[0].with_data(secret=12)
    scripts = {"0": ["10", "15", "12"], "1": ["10", "ten", "11", "13", "14"]}
    sampler = scripted(lambda conversation, turn: scripts[conversation.split("/")[3]][turn])
    async with environment.serving():
        won, lost = await environment.play(task, 2, sampler, group_id=0)
    assert [m.content for m in won.trace.messages] == ["1-20", "10", "higher", "15", "lower", "12"]
    assert lost.trace.messages[4].content == "a number" and lost.trace.num_turns == 5
    assert (won.reward, lost.reward) == (1.0, 0.0) and won.metrics == {"guesses": 3.0}
    assert not won.error and not lost.error and len(won.samples) == len(lost.samples) == 1
