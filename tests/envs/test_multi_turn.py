"""Envs that converse: verifiers' own `Env.run`, played in this process, token for token."""

import asyncio
import types
from collections import Counter

import pytest
import verifiers.v1 as vf
from verifiers.v1.configs.env import EnvConfig

from prl.envs.group import GroupRequest, play_episodes
from prl.envs.multi_turn import InProcessContext, bind_in_process


class Riddle(vf.Task):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Riddles(vf.Taskset[Riddle, vf.TasksetConfig]):
    def load(self):
        yield Riddle(vf.TaskData(idx=0, prompt="1+1="))


@pytest.fixture
def play(scripted):
    """`play(run, **sampler)`: one episode of an env whose `run` is the function; its rollouts and the sampler.

    The model says 1, 2, 3, … in each conversation.
    """

    async def episode(run, *, prompt="1+1=", setup=None, agents=("agent",), n=1, **how):
        fields = {name: vf.AgentConfig() for name in agents}
        config = type(
            "RiddleConfig", (EnvConfig,), {"__annotations__": dict.fromkeys(agents, vf.AgentConfig), **fields}
        )
        body = {"run": run} | ({"setup": setup} if setup else {})
        cls = types.new_class("RiddleEnv", (vf.Env[config],), exec_body=lambda namespace: namespace.update(body))
        env = bind_in_process(cls, Riddles(vf.TasksetConfig()))
        sampler = scripted(lambda conversation, turn: str(turn + 1), **how)
        task = Riddle(vf.TaskData(idx=0, prompt=prompt))
        request = GroupRequest(env_name="toy", task=task, n=n, sampler=sampler, group_id=1, timeout_s=5.0)
        rollouts = await play_episodes(env, InProcessContext, request)
        return rollouts, sampler

    return episode


async def three_turns(self, task, agents):
    async with agents.agent.interaction(task) as talk:
        assert (await talk.turn()).last_reply == "1"
        assert (await talk.turn("and now?")).last_reply == "2"
        await talk.turn("once more")


async def test_turns_make_one_sample_of_their_exact_tokens(play, tokenizer):
    (rollout,), sampler = await play(three_turns)
    assert rollout.error is None and rollout.reward == 3.0
    (sample,) = rollout.samples
    assert len(sampler.requests) == 3
    for request in sampler.requests:
        assert sample.token_ids[: len(request.prompt)] == request.prompt, "each prompt extends the last"
    trained = [t for t, m in zip(sample.token_ids, sample.mask, strict=True) if m]
    assert tokenizer.decode(trained) == "1<|im_end|>2<|im_end|>3<|im_end|>"
    assert {x for x, m in zip(sample.logprobs, sample.mask, strict=True) if m} == {-0.5}
    roles = [message.role for message in rollout.trace.messages]
    assert roles == ["user", "assistant"] * 3


async def test_a_request_says_whose_prompt_it_continues(play):
    """All that share a group begin alike, agent by agent."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as one, agents.other.interaction(task) as two:
            await one.turn()
            await two.turn()
            await one.turn("and now?")

    _, sampler = await play(run, agents=("agent", "other"), n=2)
    groups = [request.prefix for request in sampler.requests]
    assert Counter(group.rpartition("/")[2] for group in groups) == {"agent": 4, "other": 2} and len(set(groups)) == 2


async def test_versions_are_of_the_first_and_last_call(play):
    async def late(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
        async with agents.other.interaction(task) as talk:  # begins when the policy is at version 5
            await talk.turn()
            await talk.turn("and now?")

    rollouts, _ = await play(late, agents=("agent", "other"), updates_per_call=2)
    assert [(rollout.start_version, rollout.end_version) for rollout in rollouts] == [(3, 5), (5, 9)]


async def test_every_request_of_an_episode_has_its_own_name(play):
    _, sampler = await play(three_turns, n=3)
    assert len({request.key for request in sampler.requests}) == 9


@pytest.mark.parametrize(
    ("prompt", "message", "fits"), [("1+1=", "hello", False), (None, None, False), (None, "hello", True)]
)
async def test_the_task_says_who_speaks_first(play, prompt, message, fits):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            await talk.turn(message)

    (rollout,), _ = await play(run, prompt=prompt)
    assert rollout.trace.messages[0].content == "hello" if fits else "bare turn()" in rollout.error


class Panic(BaseException):
    """What pyo3 has a panic of a Rust extension raise."""


@pytest.mark.parametrize("slip", [asyncio.CancelledError, SystemExit, Panic])
@pytest.mark.parametrize("where", ["first", "in a conversation", "after"])
async def test_what_an_env_lets_slip_fails_the_episode_alone(play, slip, where):
    slipped = []

    async def run(self, task, agents):
        first = not slipped
        slipped.append(first)
        if first and where == "first":
            raise slip
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            if first and where == "in a conversation":
                raise slip
        if first and where == "after":
            raise slip

    rollouts, _ = await play(run, n=2)
    bad, fine = sorted(rollouts, key=lambda rollout: rollout.index)
    assert (bad.error, bad.error_kind) == (f"RuntimeError: the env's code let {slip.__name__} escape", "env")
    assert bad.samples == [] and fine.error is None and len(fine.samples) == 1
    assert len(bad.trace.calls) == (where != "first"), "what was said until then is there to be read"
