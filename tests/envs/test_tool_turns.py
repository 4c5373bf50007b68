"""Conversations with tools: token for token, cut where they have to be, and each failure with its kind."""

import asyncio
import json
import re
import types

import pytest
import verifiers.v1 as vf
from verifiers.v1.configs.env import EnvConfig

from prl.base.errors import EngineError
from prl.envs.group import GroupRequest, play_episodes, play_group
from prl.envs.multi_turn import InProcessContext, bind_in_process
from prl.envs.tools import Tools


class Sums(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None
    IN_PROCESS = True

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """The sum."""
        if a == b == 0:
            raise RuntimeError("nothing to add")
        return a + b


class Replies(vf.Task):
    """Rewarded for the number of replies."""

    @vf.reward
    async def replies(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Tasks(vf.Taskset[Replies, vf.TasksetConfig]):
    def load(self):
        yield Replies(vf.TaskData(idx=0, prompt="1+2="))


async def one_reply(self, task, agents):
    await agents.agent.run(task)


def call(name="add", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def play(scripted):
    """`play(script)`: `n` episodes of an env with tools; its rollouts by attempt, and the sampler."""

    async def episodes(
        script,
        *,
        run=one_reply,
        toolsets=(Sums,),
        task=Replies,
        n=1,
        max_turns=None,
        timeout_s=5.0,
        finalize=None,
        **how,
    ):
        config = type(
            "Config",
            (EnvConfig,),
            {"__annotations__": {"agent": vf.AgentConfig}, "agent": vf.AgentConfig(max_turns=max_turns)},
        )
        body = {"run": run} | ({"finalize": finalize} if finalize else {})
        cls = types.new_class("PlayedEnv", (vf.Env[config],), exec_body=lambda namespace: namespace.update(body))
        tools = Tools([toolset(vf.ToolsetConfig()) for toolset in toolsets])
        env = bind_in_process(cls, Tasks(vf.TasksetConfig()), tools)
        sampler = scripted(script, **how)
        data = vf.TaskData(idx=0, prompt="1+2=")
        request = GroupRequest(env_name="toy", task=task(data), n=n, sampler=sampler, group_id=1, timeout_s=timeout_s)
        rollouts = await play_episodes(env, InProcessContext, request)
        return sorted(rollouts, key=lambda rollout: rollout.index), sampler

    return episodes


def block(text):
    return f"<tool_call>\n{text}\n</tool_call>"


UNREADABLE = [
    '<tool_call>\n{"name": "add"',
    block("{nope}"),
    block('{"name": "add", "arguments": {"a": "say "one"", "b": 2}}'),
    block('{"arguments": {"a": 1}}'),
    block('{"name": ["add"], "arguments": {}}'),
    block("[1]"),
    block("[" * 3_000),
    block('{"name": "add", "arguments": {"a": ' + "1" * 5000 + ', "b": 2}}'),
]
"""Calls without whole JSON, without a name, or of numbers and nesting that Python does not read."""


def of_one(script, *, others="3"):
    """The script of a group whose first episode has `script`; all others say `others` at once."""
    return lambda conversation, turn: script[turn] if "/1/0/" in f"{conversation}/" else others


def prompts(sampler):
    (conversation,) = sampler.asked.values()
    return conversation


def bodies(rollout, role, tokenizer):
    """What the tokens of each such message say that are marked as its own words."""
    (branch,) = rollout.sample_branches
    return [
        tokenizer.decode([t for t, body in zip(node.token_ids, node.is_content, strict=True) if body])
        for node in branch.nodes
        if node.message.role == role
    ]


# --- token for token --------------------------------------------------------------------------------------------------


async def test_sample_has_exactly_the_tokens_sent_and_sampled(play, renderer, tokenizer):
    script = ["I add.\n" + call(a=1, b=2), call(a=3, b=4), "7"]
    (rollout,), sampler = await play(script)
    assert rollout.error is None and rollout.reward == 3.0
    assert [m.role for m in rollout.trace.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert bodies(rollout, "tool", tokenizer) == ["3", "7"]
    (sample,) = rollout.samples
    first, second, third = prompts(sampler)
    assert second[: len(first)] == first and third[: len(second)] == second and sample.token_ids[: len(third)] == third
    trained = [t for t, m in zip(sample.token_ids, sample.mask, strict=True) if m]
    assert tokenizer.decode(trained) == "".join(f"{text}<|im_end|>" for text in script)
    assert rollout.trace.messages[1].content.strip() == "I add."


async def test_model_reads_what_its_chat_template_renders(play, renderer, tokenizer):
    _, sampler = await play([call(a=1, b=2), "3"])
    reply_text = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        ],
    }
    answer = {"role": "tool", "content": "3", "tool_call_id": "call_0"}
    tools = Tools([Sums(vf.ToolsetConfig())]).wire
    for sent, messages in zip(prompts(sampler), ([], [reply_text, answer]), strict=True):
        whole = [{"role": "user", "content": "1+2="}, *messages]
        assert sent == renderer.render(whole, tools=tools, add_generation_prompt=True).token_ids
    assert '"name": "add"' in tokenizer.decode(sent) and "<tool_response>\n3\n</tool_response>" in tokenizer.decode(
        sent
    )


async def test_calls_of_one_reply_are_answered_in_order(play, tokenizer):
    calls = [call(a=1, b=2), call("multiply"), block("{nope}"), call(a=5, b=6)]
    (rollout,), _ = await play(["\n".join(calls), "done"])
    assert rollout.error is None and len(rollout.samples) == 1
    _, reply, *answers, _ = rollout.trace.messages
    assert [answer.content.split(":")[0] for answer in answers] == ["3", "error", "error", "11"]
    assert [answer.tool_call_id for answer in answers] == [made.id for made in reply.tool_calls]
    assert len({answer.tool_call_id for answer in answers}) == 4
    assert bodies(rollout, "tool", tokenizer) == [answer.content for answer in answers]


async def test_ids_of_calls_have_nine_characters_and_differ_over_a_conversation(play):
    script = [call(a=1, b=2) + call(a=1, b=2), call(a=1, b=2), "3"]
    ids = []
    for _ in range(2):
        (rollout,), _ = await play(script)
        ids.append([made.id for message in rollout.trace.messages for made in getattr(message, "tool_calls", 0) or []])
    assert len(set(ids[0])) == 3 and all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in ids[0])
    assert ids[0] == ids[1], "the same in another run"


# --- calls that cannot be read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply_text", UNREADABLE)
async def test_model_reads_that_its_call_was_unreadable(play, tokenizer, reply_text):
    (rollout,), sampler = await play([reply_text, "then 3"])
    assert rollout.error is None and rollout.reward == 2.0 and len(rollout.samples) == 1
    assert [m.role for m in rollout.trace.messages] == ["user", "assistant", "tool", "assistant"]
    first, second = prompts(sampler)
    assert second[: len(first)] == first and "<tool_response>\nerror: the tool call cannot be read" in tokenizer.decode(
        second[len(first) :]
    )
    (sample,) = rollout.samples
    trained = [t for t, m in zip(sample.token_ids, sample.mask, strict=True) if m]
    assert tokenizer.decode(trained) == f"{reply_text}<|im_end|>then 3<|im_end|>"


@pytest.mark.parametrize("reply_text", UNREADABLE)
async def test_without_tools_it_is_a_reply_like_any_other(play, scripted, reply_text):
    (rollout,), _ = await play([reply_text], toolsets=())
    assert rollout.trace.last_reply == reply_text
    assert rollout.error is None and rollout.reward == 1.0 and len(rollout.samples) == 1
    task = Replies(vf.TaskData(idx=0, prompt="1+2="))
    request = GroupRequest(env_name="toy", task=task, n=2, sampler=scripted([reply_text]), group_id=1, timeout_s=5.0)
    rollouts = await play_group(request)
    assert [rollout.error for rollout in rollouts] == [None] * 2 and all(len(r.samples) == 1 for r in rollouts)


# --- where a conversation ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ['<tool_call>\n{"name": "add"', call(a=1, b=2), call(a=1, b=2) + "\nand the"])
async def test_truncated_reply_calls_nothing_and_is_no_error(play, cut):
    (rollout,), sampler = await play([(cut, "length"), "never asked"])
    assert rollout.error is None and rollout.is_truncated and rollout.trace.stop_condition == "max_output_tokens"
    assert len(prompts(sampler)) == 1 and len(rollout.samples) == 1


async def test_after_max_turns_nobody_is_asked_again(play):
    ends = []

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            ends.append(await talk.turn())
            ends.append(await talk.turn("once more?"))

    (rollout,), sampler = await play([call(a=n, b=1) for n in range(9)], run=run, max_turns=3)
    assert len(prompts(sampler)) == 3 and rollout.reward == 3.0
    assert rollout.error is None and rollout.trace.stop_condition == "max_turns" and rollout.is_truncated
    assert [(end.terminated, end.messages) for end in ends] == [(True, [])] * 2
    (sample,) = rollout.samples
    assert sample.token_ids[: len(prompts(sampler)[-1])] == prompts(sampler)[-1]


async def test_an_answer_that_fills_the_context_ends_the_conversation(play):
    script = [call(a=1, b=2), call(a=3, b=4), "7"]
    _, sampler = await play(script)
    (rollout,), smaller = await play(script, room=len(prompts(sampler)[2]) - 1)
    assert len(prompts(smaller)) == 2 and rollout.error is None and rollout.reward == 2.0
    assert rollout.trace.stop_condition == "context_length" and len(rollout.samples) == 1


async def test_a_first_prompt_without_room_is_an_overlong_prompt(play):
    (rollout,), _ = await play(["3"], room=3)
    assert rollout.error == "OverlongPrompt: no room" and rollout.error_kind == "overlong_prompt"


# --- failures ---------------------------------------------------------------------------------------------------------


class CannotGrade(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        if trace.last_reply != "3":
            raise KeyError("no such answer")
        return 1.0


class NotANumber(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return 1.0 if trace.last_reply == "3" else float("nan")


async def breaks(self, task, agents):
    trace = await agents.agent.run(task)
    if trace.last_reply != "3":
        raise IndexError("lost the dice")


async def finalize_breaks(self, task, episode):
    if episode.traces[0].last_reply != "3":
        raise IndexError("cannot judge")


async def finalize_spoils(self, task, episode):
    if episode.traces[0].last_reply != "3":
        episode.traces[0].record_reward("more", float("inf"))


@pytest.mark.parametrize(
    ("how", "script", "reason", "kind"),
    [
        ({"run": breaks}, ["4"], "lost the dice", "env"),
        ({"finalize": finalize_breaks}, ["4"], "IndexError: cannot judge", "env"),
        ({"finalize": finalize_spoils}, ["4"], "ValueError: the grader gave reward inf", "env"),
        ({"task": CannotGrade}, ["4"], "no such answer", "env"),
        ({"task": NotANumber}, ["4"], "ValueError: the grader gave reward nan", "env"),
        (
            {},
            [call(a=1, b=2), EngineError("http://engine is gone", 503)],
            "EngineError: http://engine is gone",
            "engine",
        ),
    ],
)
async def test_failure_costs_one_rollout_with_reason_and_kind(play, how, script, reason, kind):
    (bad, fine), _ = await play(of_one(script), n=2, **how)
    assert reason in bad.error and bad.error_kind == kind and bad.samples == []
    assert fine.error is None and fine.reward == 1.0 and fine.samples


async def test_deadline_ends_a_conversation_and_keeps_its_turns(play):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            for _ in range(3):
                if (await talk.turn("go on" if talk.trace.calls else None)).last_reply == "hang":
                    await asyncio.sleep(60)

    (late, fine), _ = await play(of_one([call(a=1, b=2), "3", "hang"]), run=run, n=2, timeout_s=0.5)
    assert late.error_kind == "timeout" and late.samples == []
    assert late.error == "TimeoutError: not finished after 0.5 s (timeout_s or group_timeout_s of envs.toy)"
    assert [m.role for m in late.trace.messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert fine.error is None and fine.reward == 3.0


# --- state ------------------------------------------------------------------------------------------------------------


class Tally(vf.State):
    total: int = 0


class Till(vf.Toolset[vf.ToolsetConfig, Tally]):
    TOOL_PREFIX = None
    IN_PROCESS = True

    async def setup_task(self, task):
        self.task = task

    @vf.tool
    async def put(self, coins: int) -> str:
        self.state.total += coins
        await asyncio.sleep(0)
        return f"{self.state.total} for {self.task.prompt}" if hasattr(self, "task") else str(self.state.total)


class Filled(vf.Task[vf.TaskData, Tally]):
    @vf.reward
    async def coins(self, trace: vf.Trace) -> float:
        return float(trace.state.total)


class BringsItsOwn(Filled):
    @classmethod
    def toolsets(cls, config):
        return [Till(vf.ToolsetConfig())]


async def test_tool_state_belongs_to_the_rollout_and_reaches_graders(play):
    def script(conversation, turn):
        coins = int(conversation.split("/")[-3]) + 1
        return call("put", coins=coins) if turn < 3 else "done"

    rollouts, _ = await play(script, toolsets=(Till,), task=Filled, n=4)
    assert [rollout.error for rollout in rollouts] == [None] * 4
    assert [rollout.reward for rollout in rollouts] == [3.0, 6.0, 9.0, 12.0]
    given = [[m.content for m in rollout.trace.messages if m.role == "tool"] for rollout in rollouts]
    assert given == [["1", "2", "3"], ["2", "4", "6"], ["3", "6", "9"], ["4", "8", "12"]]


async def test_tools_of_a_task_know_their_task(play):
    (rollout,), sampler = await play([call("put", coins=2), call(a=1, b=2), "done"], task=BringsItsOwn)
    assert rollout.error is None and rollout.reward == 2.0
    assert [m.content for m in rollout.trace.messages if m.role == "tool"] == ["2 for 1+2=", "3"]
    given = sampler.tokenizer.decode(prompts(sampler)[0])
    assert '"name": "add"' in given and '"name": "put"' in given
