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


TURNS = [
    ("a text", ["user"], "a text"),
    ([vf.UserMessage(content="typed")], ["user"], "typed"),
    ([{"role": "user", "content": "of OpenAI's format"}], ["user"], "of OpenAI's format"),
    ([{"content": "of nobody"}], ["user"], "of nobody"),
    ([vf.UserMessage(content=[vf.TextContentPart(text=part) for part in ("in ", "parts")])], ["user"], "in parts"),
    ([{"role": "user", "content": [{"type": "text", "text": part} for part in ("on ", "wire")]}], ["user"], "on wire"),
    ([vf.SystemMessage(content="Be brief."), vf.UserMessage(content="Now.")], ["system", "user"], "Now."),
    ([vf.ToolMessage(tool_call_id="c", content="42"), {"role": "user", "content": "And?"}], ["tool", "user"], "And?"),
    ([{"role": "tool", "tool_call_id": "c", "content": "42"}], ["tool"], "42"),
    ((vf.UserMessage(content="one"), vf.UserMessage(content="two")), ["user", "user"], "two"),
    ([vf.AssistantMessage(content="I was told."), vf.UserMessage(content="What?")], ["assistant", "user"], "What?"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "roles", "last"), TURNS)
@pytest.mark.parametrize("prompt", [None, "1+1="])
async def test_a_turn_takes_what_verifiers_takes(play, tokenizer, said, roles, last, prompt):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            if prompt is not None:
                await talk.turn()
            await talk.turn(said)

    (rollout,), sampler = await play(run, prompt=prompt)
    assert rollout.error is None
    opening = [] if prompt is None else ["user", "assistant"]
    messages = rollout.trace.messages
    assert [message.role for message in messages] == [*opening, *roles, "assistant"]
    assert messages[-2].content == last and last in tokenizer.decode(sampler.requests[-1].prompt)


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    "said",
    [
        [vf.UserMessage(content=[vf.ImageUrlContentPart(**PICTURE), vf.TextContentPart(text="What is it?")])],
        [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, PICTURE]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]}],
        [vf.ToolMessage(tool_call_id="c", content=[vf.ImageUrlContentPart(**PICTURE)])],
        [{"role": "user", "content": ["data:image/png"]}],
    ],
)
async def test_a_turn_that_is_no_text_fails_the_episode_by_name(play, said):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await talk.turn(said)

    (rollout,), _ = await play(run)
    kind = "input_audio" if "input_audio" in str(said) else "data:image/png"
    assert kind in rollout.error and len(rollout.error.splitlines()) == 1 and not rollout.samples


class Stopped(Riddle):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 2


async def test_a_stop_of_the_task_ends_its_conversation(play):
    ended = []

    async def run(self, task, agents):
        async with agents.agent.interaction(Stopped(task.data)) as talk:
            ended.append((await talk.turn()).terminated)
            ended.extend([(await talk.turn(word)).terminated for word in ("again", "once more")])

    (rollout,), _ = await play(run)
    assert ended == [False, False, True] and rollout.trace.stop_condition == "enough" and rollout.reward == 2.0


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
