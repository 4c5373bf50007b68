"""Playing a task: the exact tokens in and out, and errors that stay with their rollout."""

import asyncio
import contextlib

import pytest
import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.types import SystemMessage, UserMessage

from prl.base.errors import EngineError
from prl.engines.sampler import OverlongPrompt
from prl.envs.group import GroupRequest, nothing_more, play_group
from prl.envs.turn import opening_messages


class Graded(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "2")


@pytest.fixture
def play(scripted):
    """`play(replies, task)`: a group's rollouts, by attempt. New weights arrive while the model answers."""

    async def run(
        replies, task=Graded, *, timeout_s=5.0, arrived=nothing_more, finish="stop", error=None, frozen=False, **how
    ):
        how |= {"temperature": 0.7, "version": None if frozen else 3, "updates_per_call": 1}
        run.sampler = scripted([error or (replies, finish)], **how)
        task = task(vf.TaskData(idx=0, prompt="1+1=")) if isinstance(task, type) else task
        request = {"task": task, "n": len(replies), "sampler": run.sampler, "group_id": 9, "timeout_s": timeout_s}
        return await play_group(GroupRequest(env_name="toy", arrived=arrived, **request))

    return run


async def test_group_is_one_request_with_tokens_for_each_rollout(play, renderer):
    rollouts = await play(["2", "3", "12"])
    [request] = play.sampler.requests
    prompt, n, key = request.prompt, request.n, request.key
    assert prompt == renderer.render([{"role": "user", "content": "1+1="}], add_generation_prompt=True).token_ids
    assert n == 3 and key.startswith("toy/") and key.endswith("/9")
    assert [r.reward for r in rollouts] == [1.0, 0.0, 0.0] and not any(r.error for r in rollouts)
    for rollout, length in zip(rollouts, (2, 2, 3), strict=True):
        [sample] = rollout.samples
        assert sample.token_ids[: len(prompt)] == prompt and len(sample.token_ids) == len(prompt) + length
        assert sample.temperatures == [1.0] * len(prompt) + [0.7] * length and rollout.group_id == 9
        assert (rollout.start_version, rollout.end_version) == (3, 4)
        assert rollout.trace.ok and rollout.trace.is_completed and not rollout.is_truncated


OPENINGS = {
    "a question": {"prompt": "1+1="},
    "after a system message": {"prompt": "1+1=", "system_prompt": "Be brief."},
    "after an example": {
        "prompt": [
            vf.UserMessage(content="1+1="),
            vf.AssistantMessage(content="2", reasoning_content="easy"),
            vf.UserMessage(content="1+1="),
        ]
    },
}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("opening", OPENINGS)
async def test_reply_in_a_group_leaves_the_trace_of_one(play, opening, frozen):
    task, replies = Graded(vf.TaskData(idx=0, **OPENINGS[opening])), ["2", "317", "2"]
    left_out = {"id": True, "timing": True, "calls": {"__all__": {"time"}}, "nodes": {"__all__": {"timestamp"}}}
    together = [rollout.trace for rollout in await play(replies, task, frozen=frozen)]
    for text, trace in zip(replies, together, strict=True):
        [alone] = [rollout.trace for rollout in await play([text], task, frozen=frozen)]
        assert trace.model_dump(exclude=left_out) == alone.model_dump(exclude=left_out)
        assert [node.logical_ids for node in trace.nodes] == [node.logical_ids for node in alone.nodes]
        assert [call.digest for call in trace.calls] == [call.digest for call in alone.calls]
        history = [*opening_messages(task.data), trace.nodes[-1].message, vf.UserMessage(content="more")]
        assert graph.prepare_turn(trace, history).path_len == graph.prepare_turn(alone, history).path_len > 0
    assert len({id(node) for trace in together for node in trace.nodes}) == sum(len(t.nodes) for t in together)


async def test_frozen_rollouts_have_no_version_or_logprobs(play):
    rollouts = await play(["2", "3"], frozen=True)
    assert [(r.error, r.start_version, r.end_version, r.reward) for r in rollouts] == [
        (None, None, None, 1.0),
        (None, None, None, 0.0),
    ]
    for rollout in rollouts:
        [sample] = rollout.samples
        assert sum(sample.mask) == 2 and sample.logprobs == [0.0] * len(sample.mask)


# --- graders that fail ------------------------------------------------------------------------------------------------


class Panic(BaseException):
    """What pyo3 has a panic of a Rust extension raise."""


RAISED = {
    "3": (ValueError("no"), "TaskError: task Fails scoring: ValueError: no"),
    "4": (asyncio.CancelledError(), "RuntimeError: the env's code let CancelledError escape"),
    "5": (SystemExit(3), "TaskError: task Fails scoring: RuntimeError: the env's code let SystemExit escape: 3"),
    "6": (
        KeyboardInterrupt(),
        "TaskError: task Fails scoring: RuntimeError: the env's code let KeyboardInterrupt escape",
    ),
    "7": (Panic("of an index"), "RuntimeError: the env's code let Panic escape: of an index"),
    "8": (GeneratorExit(), "RuntimeError: the env's code let GeneratorExit escape"),
}


class Fails(vf.Task):
    """Its grader raises, cancels itself, takes no notice of its deadline, or grades with the number in the reply."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        reply = trace.last_reply
        if reply in RAISED:
            raise RAISED[reply][0]
        if reply == "cancels":
            asyncio.current_task().cancel()
            await asyncio.sleep(60.0)
        if reply == "ignores":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60.0)
        return 1.0


class FailsBesideAnother(Fails):
    @vf.reward
    async def another(self, trace: vf.Trace) -> float:
        await asyncio.sleep(0.0)
        return 0.5


async def test_what_a_grader_raises_costs_its_own_rollout(play):
    rollouts = await play(["2", *RAISED, "2"], Fails)
    assert [rollout.error for rollout in rollouts] == [None, *(error for _, error in RAISED.values()), None]
    assert [len(rollout.samples) for rollout in rollouts] == [1, *[0] * len(RAISED), 1]
    assert {rollout.error_kind for rollout in rollouts} == {None, "env"}


@pytest.mark.parametrize("task", [Fails, FailsBesideAnother])
async def test_misbehaving_grader_costs_only_its_own_rollout(play, task):
    playing = asyncio.current_task()
    rollouts = await play(["2", "cancels", "ignores", "2"], task, timeout_s=0.3)
    assert [rollout.error_kind for rollout in rollouts] == [None, "env", "timeout", None]
    assert rollouts[1].error == "RuntimeError: the env's code let CancelledError escape"
    assert playing.cancelling() == 0


class Gives(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return float(trace.last_reply)


async def test_a_reward_is_finite_and_fits_the_trainer(play):
    """A group's credit is a difference of rewards, in float32: at most 3.4e38."""
    too_large = ("3.1e+38", "-3.1e+38", "1e+308", "nan", "inf", "-inf")
    rollouts = await play(["3e38", "-3e38", *too_large], Gives)
    errors = [f"ValueError: the grader gave reward {reward} (answer: {reward})" for reward in too_large]
    assert [rollout.error for rollout in rollouts] == [None, None, *errors]


class Odd(Graded):
    @vf.metric
    async def odd(self, trace: vf.Trace) -> float:
        return float(trace.last_reply)


async def test_rollouts_with_metrics_that_are_not_finite_train(play):
    rollouts = await play(["2", "nan", "inf", "nan"], Odd)
    assert all(rollout.error is None and rollout.samples for rollout in rollouts)


# --- a model that fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"error": EngineError("http://engine is gone", 503)}, "EngineError: http://engine is gone"),
        ({"error": OverlongPrompt("the prompt has 99 tokens")}, "OverlongPrompt: the prompt has 99 tokens"),
        (
            {"delay": 30.0, "timeout_s": 0.01},
            "TimeoutError: not finished after 0.01 s (timeout_s or group_timeout_s of",
        ),
    ],
)
async def test_a_model_that_fails_takes_the_group_with_it(play, how, error):
    rollouts = await play(["2", "3"], **how)
    assert all(rollout.error.startswith(error) and not rollout.samples for rollout in rollouts) and len(rollouts) == 2


async def test_bug_is_no_failed_episode(play):
    with pytest.raises(ZeroDivisionError):
        await play(["2"], error=ZeroDivisionError())


async def test_a_completion_that_ran_out_of_room_is_truncated(play):
    [rollout] = await play(["2"], finish="length")
    assert rollout.is_truncated and rollout.trace.stop_condition == "max_output_tokens"


def test_a_conversation_opens_with_the_system_prompt():
    both = opening_messages(vf.TaskData(prompt="hi", system_prompt="be brief"))
    assert both == [SystemMessage(content="be brief"), UserMessage(content="hi")]
    assert opening_messages(vf.TaskData(prompt=[UserMessage(content="a")])) == [UserMessage(content="a")]


# --- as they finish ---------------------------------------------------------------------------------------------------


class Sequel(vf.Task):
    """Grades "2" once another rollout has arrived, and "6" in a minute."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        try:
            if trace.last_reply == "2":
                await self.another_arrived.wait()
            if trace.last_reply == "6":
                await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            self.cancelled.append(trace.last_reply)
            raise
        return float(trace.last_reply)


@pytest.fixture
def sequel(monkeypatch):
    monkeypatch.setattr(Sequel, "another_arrived", asyncio.Event(), raising=False)
    monkeypatch.setattr(Sequel, "cancelled", [], raising=False)
    return Sequel(vf.TaskData(idx=0, prompt="1+1="))


class CancelsItself(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        asyncio.current_task().cancel()
        return 1.0


async def test_grader_that_cancels_itself_fails_its_rollout_alone(play):
    async def arrived(_):
        await asyncio.sleep(0)

    rollouts = await play(["2", "3"], CancelsItself, arrived=arrived)
    assert all("CancelledError" in str(rollout.error) for rollout in rollouts)


async def test_rollout_arrives_once_graded(play, sequel):
    rewards = []

    async def arrived(rollout):
        assert rollout.error is None and rollout.samples and rollout.trace.ok and rollout.end_version == 4
        rewards.append((rollout.index, rollout.reward))
        sequel.another_arrived.set()

    async with asyncio.timeout(5):
        rollouts = await play(["2", "3", "1"], sequel, timeout_s=2.0, arrived=arrived)
    assert rewards == [(1, 3.0), (2, 1.0), (0, 2.0)]
    assert [rollout.index for rollout in rollouts] == [0, 1, 2]


async def test_time_of_an_arrival_is_not_the_rollouts(play):
    rollouts = await play(["2", "3"], timeout_s=0.2, arrived=lambda _: asyncio.sleep(0.3))
    assert [rollout.error for rollout in rollouts] == [None, None]


async def test_failing_arrival_cancels_running_graders(play, sequel):
    async def arrived(rollout):
        assert rollout.reward == 3.0 and sequel.cancelled == []
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await play(["2", "3", "6"], sequel, arrived=arrived)
    assert sorted(sequel.cancelled) == ["2", "6"]
