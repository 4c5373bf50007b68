"""math_retry: one try, or two with a correction between them."""

from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from prl.config.schema import EnvConfig
from prl.envs.math import MathConfig, MathTaskset
from prl.envs.math_retry import MathRetryEnv, MathRetryTaskset, correction
from prl.episodes.environment import Environment
from prl.episodes.multi_turn import bind_in_process


class Talk:
    """Says what it was made with."""

    def __init__(self, replies):
        self.replies, self.asked = iter(replies), []

    async def turn(self, message=None):
        self.asked.append(message)
        return type("Segment", (), {"last_reply": next(self.replies)})

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


@pytest.fixture
def task():
    return next(iter(MathRetryTaskset(MathConfig(num_tasks=1))))


@pytest.fixture
def play(task):
    async def run(*replies):
        talk = Talk(replies)
        agents = type("Agents", (), {"agent": type("Agent", (), {"interaction": staticmethod(lambda task: talk)})})
        await MathRetryEnv.run(None, task, agents)
        return talk.asked

    return run


async def test_a_right_reply_ends_it(task, play):
    assert await play(str(task.data.answer)) == [None]


async def test_a_wrong_reply_is_corrected_and_asked_again_once(task, play):
    asked = await play("nothing", "nothing")
    assert asked == [None, correction(task.data.prompt, task.data.answer)]
    assert f"{task.data.prompt}{task.data.answer}" in asked[1]


@pytest.mark.parametrize(("replies", "expected"), [(("right",), 1.0), (("no", "right"), 0.5), (("no", "no"), 0.0)])
async def test_a_second_try_is_worth_half(task, replies, expected):
    replies = [str(task.data.answer) if reply == "right" else reply for reply in replies]
    messages = [SimpleNamespace(content=reply) for reply in replies]
    trace = SimpleNamespace(assistant_messages=messages, last_reply=replies[-1], num_turns=len(replies))
    assert await task.answer(trace) == expected
    assert await task.correct_at_once(trace) == float(expected == 1.0)


def test_its_problems_and_its_splits_are_those_of_math():
    config = {"num_tasks": 50, "seed": 3}
    ours = [task.data for task in MathRetryTaskset(MathConfig(**config))]
    assert ours == [task.data for task in MathTaskset(MathConfig(**config))]


def test_it_is_played_as_a_conversation():
    environment = Environment("retry", EnvConfig(taskset="prl.envs.math_retry", args={"num_tasks": 3}), eval_tasks=0)
    assert isinstance(environment.verifiers_env, MathRetryEnv) and isinstance(environment.verifiers_env, vf.Env)
    assert bind_in_process(MathRetryEnv, environment.taskset).config.agent is not None
