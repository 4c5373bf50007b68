"""Playing a task: the exact tokens in and out, and errors that stay with their rollout."""

import asyncio
import contextlib
import dataclasses
import gc
import weakref
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.types import SystemMessage, UserMessage

from prl.episodes.group import GroupRequest, play_group
from prl.episodes.turn import AGENT, commit, commit_alike, opening_messages, parse, trace_task
from prl.errors import EngineError
from prl.inference.replies import Completion
from prl.inference.sampler import OverlongPrompt


class Graded(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        if trace.last_reply == "7":
            raise RuntimeError("sevens confuse me")
        return float(trace.last_reply == "2")


class FakeSampler:
    """Gives out the replies it was made with."""

    def __init__(self, renderer, tokenizer, replies, *, finish="stop", error=None, delay=0.0):
        self.renderer, self.tokenizer, self.replies = renderer, tokenizer, replies
        self.finish, self.error, self.delay = finish, error, delay
        self.temperature = 0.7
        self.pool = SimpleNamespace(model="policy")
        self.version = 3
        self.asked = []

    async def complete(self, prompt_ids, *, n, key, dialogue=None, prefix=None):
        self.asked.append((prompt_ids, n, key))
        await asyncio.sleep(self.delay)
        if self.error:
            raise self.error
        started, self.version = self.version, self.version + 1  # new weights arrive meanwhile
        eos = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        ids = [[*self.tokenizer.encode(text, add_special_tokens=False), eos] for text in self.replies]
        return [Completion(i, [-0.25] * len(i), self.finish, started, self.version) for i in ids]


def request(sampler, *, task=None, timeout_s=5.0):
    task = task or Graded(vf.TaskData(idx=0, prompt="1+1="))
    return GroupRequest(
        env_name="toy", task=task, n=len(sampler.replies), sampler=sampler, group_id=9, timeout_s=timeout_s
    )


@pytest.fixture
def play(renderer, tokenizer):
    async def run(replies, *, task=None, timeout_s=5.0, **how):
        sampler = FakeSampler(renderer, tokenizer, replies, **how)
        rollouts = [rollout async for rollout in play_group(request(sampler, task=task, timeout_s=timeout_s))]
        assert len(set(map(id, rollouts))) == len(replies), "each rollout is yielded once"
        return rollouts, sampler

    return run


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


@pytest.mark.parametrize("attributed", [True, False])
@pytest.mark.parametrize("opening", OPENINGS)
async def test_another_reply_leaves_what_a_turn_of_its_own_would(renderer, tokenizer, opening, attributed):
    """Every field of the trace, but for its id and the times; whichever reply was the first."""
    task = Graded(vf.TaskData(idx=0, **OPENINGS[opening]))
    sampler, messages = FakeSampler(renderer, tokenizer, ["2", "317", "2"]), opening_messages(task.data)
    rendered = renderer.render([message_to_wire(each) for each in messages], add_generation_prompt=True)
    if not attributed:
        rendered = dataclasses.replace(rendered, is_content=[])
    span = vf.TimeSpan(start=1.0, end=2.0)
    completions = await sampler.complete(rendered.token_ids, n=3, key="")
    completions[2].finish_reason = "length"

    def new():
        return vf.Trace(task=trace_task(task), agent=AGENT)

    def left(trace):
        return trace.model_dump(exclude={"id": True, "timing": True, "nodes": {"__all__": {"timestamp"}}})

    for first in completions:
        opened = new()
        commit(graph.prepare_turn(opened, messages), rendered, first, sampler, span)
        for completion in completions:
            plain, alike = new(), new()
            commit(graph.prepare_turn(plain, messages), rendered, completion, sampler, span)
            commit_alike(alike, opened, rendered, completion, sampler, span)
            assert left(alike) == left(plain)
            assert [vars(a).keys() - vars(b).keys() for a, b in zip(alike.nodes, plain.nodes, strict=True)] == [
                set() for _ in plain.nodes
            ]
            assert [node.logical_ids for node in alike.nodes] == [node.logical_ids for node in plain.nodes]
            assert [(call.digest, call.end_version) for call in alike.calls] == [
                (call.digest, call.end_version) for call in plain.calls
            ]
            assert not {id(node) for node in alike.nodes} & {id(node) for node in opened.nodes}
            history = [*messages, alike.nodes[-1].message, vf.UserMessage(content="more")]
            assert graph.prepare_turn(alike, history).path_len == graph.prepare_turn(plain, history).path_len > 0


async def test_a_group_is_one_request_and_each_rollout_has_its_own_tokens(play, renderer):
    rollouts, sampler = await play(["2", "3", "12"])
    ((prompt, n, key),) = sampler.asked
    assert prompt == renderer.render([{"role": "user", "content": "1+1="}], add_generation_prompt=True).token_ids
    assert n == 3 and key.startswith("toy/") and key.endswith("/9")
    assert [r.reward for r in rollouts] == [1.0, 0.0, 0.0] and not any(r.error for r in rollouts)
    for rollout, length in zip(rollouts, (2, 2, 3), strict=True):
        (sample,) = rollout.samples
        assert sample.token_ids[: len(prompt)] == prompt and len(sample.token_ids) == len(prompt) + length
        assert sample.temperatures == [1.0] * len(prompt) + [0.7] * length and rollout.group_id == 9
        assert (rollout.start_version, rollout.end_version) == (3, 4)
        assert rollout.trace.ok and rollout.trace.is_completed and not rollout.is_truncated


async def test_a_grader_that_fails_takes_one_rollout_with_it(play):
    rollouts, _ = await play(["2", "7", "3"])
    assert [rollout.error is None for rollout in rollouts] == [True, False, True]
    assert "sevens confuse me" in rollouts[1].error and rollouts[1].samples == [] and rollouts[1].trace.has_error


class LetsSlip(vf.Task):
    """Its grader lets something slip that is meant to end more than itself, or hangs."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        match trace.last_reply:
            case "7":
                raise asyncio.CancelledError
            case "8":
                raise SystemExit(3)
            case "6":
                await asyncio.sleep(60.0)
        return 1.0


async def test_what_a_grader_lets_slip_costs_its_own_rollout(play):
    rollouts, _ = await play(["2", "7", "3", "8"], task=LetsSlip(vf.TaskData(idx=0, prompt="1+1=")))
    assert [(rollout.error, rollout.error_kind) for rollout in rollouts] == [
        (None, None),
        ("RuntimeError: the env's code let CancelledError escape", "env"),
        (None, None),
        ("TaskError: task LetsSlip scoring: RuntimeError: the env's code let SystemExit escape: 3", "env"),
    ]
    assert [len(rollout.samples) for rollout in rollouts] == [1, 0, 1, 0]


class Cancels(vf.Task):
    """Its grader cancels the task that it runs in, or takes no notice of its deadline."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        match trace.last_reply:
            case "7":
                asyncio.current_task().cancel()
            case "8":
                asyncio.current_task().cancel()
                await asyncio.sleep(60.0)
            case "6":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60.0)
        return 1.0


class CancelsBesideAnother(Cancels):
    @vf.reward
    async def another(self, trace: vf.Trace) -> float:
        await asyncio.sleep(0.0)
        return 0.5


@pytest.mark.parametrize("task", [Cancels, CancelsBesideAnother])
async def test_a_grader_that_cancels_its_task_or_takes_no_notice_costs_its_own_rollout(play, task):
    asked = asyncio.current_task()
    rollouts, _ = await play(["2", "7", "8", "6", "3"], task=task(vf.TaskData(idx=0, prompt="1+1=")), timeout_s=0.3)
    rollouts = sorted(rollouts, key=lambda rollout: rollout.index)
    assert [rollout.error_kind for rollout in rollouts] == [None, "env", "env", "timeout", None]
    assert [rollout.error for rollout in rollouts][1:3] == [
        "RuntimeError: the env's code let CancelledError escape"
    ] * 2
    assert asked.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_group_that_somebody_cancels_is_cancelled(play):
    task = LetsSlip(vf.TaskData(idx=0, prompt="1+1="))
    group = asyncio.create_task(play(["2", "6", "7"], task=task))
    await asyncio.sleep(0.1)  # the graders are at work
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(group, 5)
    asking = asyncio.create_task(play(["2"], delay=60.0))
    await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asking, 5)


class Refuses(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        raise ValueError("no")


@pytest.mark.parametrize("task", [Cancels, Refuses])
async def test_rollouts_leave_nothing_to_pythons_collector(play, task):
    """It looks for cycles once in 100,000 objects, and there may be many rollouts of many tokens until then."""
    gc.collect()
    gc.disable()
    try:
        rollouts, _ = await play(["2", "3", "7"], task=task(vf.TaskData(idx=0, prompt="1+1=")))
        left = [weakref.ref(rollout.trace) for rollout in rollouts]
        del rollouts
        await asyncio.sleep(0)
        assert [trace() for trace in left] == [None] * 3
    finally:
        gc.enable()


class Gives(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return float(trace.last_reply)


async def test_a_reward_is_finite_and_fits_the_trainer(play):
    """A group's credit is a difference of rewards, in float32: at most 3.4e38."""
    task = Gives(vf.TaskData(idx=0, prompt="1+1="))
    rollouts, _ = await play(["3e38", "-3e38", "3.1e38", "-3.1e38", "1e308", "nan", "inf", "-inf"], task=task)
    assert [rollout.error for rollout in rollouts] == [None, None] + [
        f"ValueError: the grader gave reward {said} (answer: {said})"
        for said in ("3.1e+38", "-3.1e+38", "1e+308", "nan", "inf", "-inf")
    ]


class Odd(vf.Task):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return 1.0

    @vf.metric
    async def odd(self, trace: vf.Trace) -> float:
        return float(trace.last_reply)


async def test_a_metric_that_is_no_finite_number_is_told_once_and_its_rollout_trains(play, caplog, monkeypatch):
    monkeypatch.setattr("prl.episodes.group._told", set())
    rollouts, _ = await play(["2", "nan", "inf", "nan"], task=Odd(vf.TaskData(idx=0, prompt="1+1=")))
    assert all(rollout.error is None and rollout.samples for rollout in rollouts)
    (told,) = [record.getMessage() for record in caplog.records if "odd" in record.getMessage()]
    assert told.startswith("env toy: its metric odd is ") and "left out of its mean" in told


class Interrupts(vf.Task):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "7":
            raise KeyboardInterrupt
        return 1.0


async def test_an_interrupt_that_a_grader_raises_is_not_the_users(play):
    rollouts, _ = await play(["2", "7"], task=Interrupts(vf.TaskData(idx=0, prompt="1+1=")))
    assert [rollout.error for rollout in rollouts] == [
        None,
        "TaskError: task Interrupts scoring: RuntimeError: the env's code let KeyboardInterrupt escape",
    ]


class Panic(BaseException):
    """What pyo3 has a panic of a Rust extension raise."""


PANICS = {
    "7": (Panic("index out of bounds"), "Panic escape: index out of bounds"),
    "8": (GeneratorExit(), "GeneratorExit escape"),
    "9": (
        BaseExceptionGroup("both", [KeyboardInterrupt(), SystemExit(0)]),
        "BaseExceptionGroup escape: both (2 sub-exceptions)",
    ),
}


class Panics(vf.Task):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply in PANICS:
            raise PANICS[trace.last_reply][0]
        return 1.0


async def test_what_a_grader_raises_that_is_no_exception_costs_its_own_rollout(play):
    rollouts, _ = await play(["2", *PANICS, "3"], task=Panics(vf.TaskData(idx=0, prompt="1+1=")))
    said = [f"RuntimeError: the env's code let {said}" for _, said in PANICS.values()]
    assert [rollout.error for rollout in rollouts] == [None, *said, None]


@pytest.mark.parametrize(
    "error", [EngineError("http://engine is gone", 503), OverlongPrompt("the prompt has 99 tokens")]
)
async def test_an_engine_that_fails_takes_the_group_with_it(play, error):
    rollouts, _ = await play(["2", "3"], error=error)
    assert [rollout.error for rollout in rollouts] == [f"{type(error).__name__}: {error}"] * 2


async def test_a_deadline_names_its_key(play):
    rollouts, _ = await play(["2"], delay=30.0, timeout_s=0.01)
    said = "TimeoutError: not finished after 0.01 s (timeout_s or group_timeout_s of envs.toy)"
    assert rollouts[0].error == f"{said}, waiting for model 'policy'"


async def test_a_bug_is_not_taken_for_an_episode_that_failed(play):
    with pytest.raises(ZeroDivisionError):
        await play(["2"], error=ZeroDivisionError())


async def test_a_completion_that_ran_out_of_room_is_truncated(play):
    (rollout,), _ = await play(["2"], finish="length")
    assert rollout.is_truncated and rollout.trace.stop_condition == "max_output_tokens"


def test_a_conversation_opens_with_the_system_prompt():
    both = opening_messages(vf.TaskData(prompt="hi", system_prompt="be brief"))
    assert both == [SystemMessage(content="be brief"), UserMessage(content="hi")]
    assert opening_messages(vf.TaskData(prompt=[UserMessage(content="a")])) == [UserMessage(content="a")]


def test_a_reply_with_a_tool_call_is_parsed(renderer, tokenizer):
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    message = parse(tokenizer.encode(text, add_special_tokens=False), renderer)
    (call,) = message.tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 1}') and message.content is None


# --- as they finish ---------------------------------------------------------------------------------------------------


class Sequel(vf.Task):
    """Grades "2" once another rollout was yielded, cannot grade "7", and grades "6" in a minute."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        try:
            if trace.last_reply == "2":
                await self.another_was_yielded.wait()
            if trace.last_reply == "6":
                await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            self.cancelled.append(trace.last_reply)
            raise
        if trace.last_reply == "7":
            raise RuntimeError("sevens confuse me")
        return float(trace.last_reply)


@pytest.fixture
def sequel(monkeypatch):
    monkeypatch.setattr(Sequel, "another_was_yielded", asyncio.Event(), raising=False)
    monkeypatch.setattr(Sequel, "cancelled", [], raising=False)
    return Sequel(vf.TaskData(idx=0, prompt="1+1="))


async def test_each_rollout_is_yielded_as_soon_as_it_is_graded_however_long_its_siblings_take(
    renderer, tokenizer, sequel
):
    rewards = []
    sampler = FakeSampler(renderer, tokenizer, ["2", "3", "1"])
    async with asyncio.timeout(5):
        async for rollout in play_group(request(sampler, task=sequel, timeout_s=2.0)):
            assert rollout.error is None and rollout.samples and rollout.trace.ok and rollout.end_version == 4, (
                "complete"
            )
            rewards.append((rollout.index, rollout.reward))
            sequel.another_was_yielded.set()
    assert rewards == [(1, 3.0), (2, 1.0), (0, 2.0)]


async def test_the_time_that_the_consumer_takes_is_not_the_rollouts(renderer, tokenizer):
    """It may ask another model about each of them, for longer than the rollout may take."""
    sampler = FakeSampler(renderer, tokenizer, ["2", "3"])
    errors = []
    async for rollout in play_group(request(sampler, timeout_s=0.2)):
        await asyncio.sleep(0.3)
        errors.append(rollout.error)
    assert errors == [None, None]


@pytest.mark.parametrize(
    "how",
    [
        {"error": EngineError("http://engine is gone", 503)},
        {"error": OverlongPrompt("99 tokens")},
        {"delay": 30.0},
    ],
)
async def test_without_an_answer_every_rollout_is_yielded_as_a_failed_one(renderer, tokenizer, how):
    sampler = FakeSampler(renderer, tokenizer, ["2", "3"], **how)
    rollouts = [rollout async for rollout in play_group(request(sampler, timeout_s=0.1))]
    assert len(rollouts) == 2 and all(rollout.error and not rollout.samples for rollout in rollouts)


async def test_a_consumer_that_stops_early_cancels_the_graders_that_still_run(renderer, tokenizer, sequel):
    sampler = FakeSampler(renderer, tokenizer, ["2", "3", "6"])
    async with contextlib.aclosing(play_group(request(sampler, task=sequel))) as group:
        async for rollout in group:
            assert rollout.reward == 3.0
            break
        assert sequel.cancelled == []
    assert sorted(sequel.cancelled) == ["2", "6"]


async def test_a_consumer_that_fails_cancels_the_graders_that_still_run(renderer, tokenizer, sequel):
    sampler = FakeSampler(renderer, tokenizer, ["6", "3"])
    with pytest.raises(ZeroDivisionError):
        async with contextlib.aclosing(play_group(request(sampler, task=sequel))) as group:
            async for _ in group:
                raise ZeroDivisionError
    assert sequel.cancelled == ["6"]


async def test_a_consumer_that_is_cancelled_cancels_the_graders_that_still_run(renderer, tokenizer, sequel):
    sampler = FakeSampler(renderer, tokenizer, ["6", "2"])

    async def consume():
        return [rollout async for rollout in play_group(request(sampler, task=sequel))]

    consumer = asyncio.create_task(consume())
    await asyncio.sleep(0.1)  # the graders are at work
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(consumer, 5)
    assert sorted(sequel.cancelled) == ["2", "6"]


async def test_a_frozen_models_rollouts_have_no_version(renderer, tokenizer):
    class Frozen(FakeSampler):
        version = property(lambda self: None, lambda self, value: None)

        async def complete(self, prompt_ids, *, n, key, dialogue=None, prefix=None):
            eos = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
            ids = [[*self.tokenizer.encode(text, add_special_tokens=False), eos] for text in self.replies]
            return [Completion(i, [], "stop") for i in ids]

    sampler = Frozen(renderer, tokenizer, ["2", "3"])
    rollouts = [rollout async for rollout in play_group(request(sampler))]
    assert [(r.error, r.start_version, r.end_version, r.reward) for r in rollouts] == [
        (None, None, None, 1.0),
        (None, None, None, 0.0),
    ]
    for rollout in rollouts:
        (sample,) = rollout.samples
        assert sum(sample.mask) == 2 and sample.logprobs == [0.0] * len(sample.mask)
