"""Episodes that verifiers' own Env plays: its traces as rollouts, and with what it reaches the model."""

import asyncio
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from prl.episodes.tools import MalformedToolCall
from prl.episodes.verifiers_env import model_context, play_program
from prl.inference.sampler import Sampler
from prl.inference.sampling import SamplingConfig


class Program:
    """Plays the episodes it is given, in the order they are asked for; one may be a function that makes it."""

    def __init__(self, *episodes):
        self.episodes = list(episodes)
        self.contexts = []

    async def run_episode(self, task, context):
        self.contexts.append(context)
        episode = self.episodes.pop(0)
        return await episode() if callable(episode) else episode


def episode(*traces, errors=()):
    return SimpleNamespace(traces=list(traces), errors=list(errors))


@pytest.fixture
def make_trace(talk, user, renderer, tokenizer):
    def make(reply="2", *, reward=1.0, ok=True, trainable=True):
        fresh = type(talk)(renderer, tokenizer)
        fresh.turn([user("1+1=")], reply)
        fresh.trace.record_reward("answer", reward)
        fresh.trace.ok = ok
        fresh.trace.agent.trainable = trainable
        return fresh.trace

    return make


class Pool:
    """Of the policy; `Frozen` is one of a frozen model."""

    urls = ("http://a:1", "http://b:2")
    model = "policy"
    api_key_var = "PRL_TOKEN"
    version = 3

    @property
    def cache_salt(self):
        return f"v{self.version}"


class Frozen(Pool):
    model = "teacher"
    api_key_var = None
    version = cache_salt = None


@pytest.fixture
def make_sampler(renderer):
    def make(pool=Pool, **sampling):
        return Sampler(
            SamplingConfig(**sampling), pool(), renderer, max_model_len=64, seed=0, tokenizer_path="/models/t"
        )

    return make


@pytest.fixture
def play(make_sampler):
    """`play(program, n)`: the rollouts, and those that arrived in their order."""

    async def run(program, n, *, pool=Pool, timeout_s=5.0, arrived=None):
        seen = []

        async def note(rollout):
            seen.append(rollout)
            if arrived is not None:
                await arrived(rollout)

        task = vf.Task(vf.TaskData(idx=0, prompt="1+1="))
        where = {"group_id": 4, "timeout_s": timeout_s, "arrived": note}
        async with asyncio.timeout(10):
            found = await play_program(program, lambda sampler, key: key, "toy", task, n, make_sampler(pool), **where)
        return found, seen

    return run


async def test_each_trainable_trace_is_a_rollout_and_arrives_once(play, make_trace):
    program = Program(
        episode(make_trace("1", reward=0.1), make_trace("9", trainable=False)),
        episode(make_trace("2", reward=0.2), make_trace("3", reward=0.3)),
    )
    rollouts, arrived = await play(program, 2)
    assert [rollout.reward for rollout in rollouts] == [0.1, 0.2, 0.3] and not any(r.error for r in rollouts)
    assert sorted(map(id, arrived)) == sorted(map(id, rollouts))
    assert all(len(rollout.samples) == 1 and rollout.group_id == 4 for rollout in rollouts)
    assert len(set(program.contexts)) == 2, "episodes are told apart"


async def test_an_episodes_rollouts_arrive_when_it_ends_whatever_the_others_take(play, make_trace):
    somebody = asyncio.Event()

    async def later():
        await somebody.wait()
        return episode(make_trace("2", reward=0.2))

    async def arrived(rollout):
        assert rollout.samples, "complete"
        somebody.set()

    rollouts, order = await play(
        Program(later, episode(make_trace("1", reward=0.1))), 2, timeout_s=2.0, arrived=arrived
    )
    assert [rollout.reward for rollout in rollouts] == [0.2, 0.1] and not any(r.error for r in rollouts)
    assert [rollout.reward for rollout in order] == [0.1, 0.2]


async def test_an_arrival_is_awaited_and_not_timed(play, make_trace):
    done = []

    async def slow(rollout):
        await asyncio.sleep(0.3)
        done.append(rollout)

    rollouts, _ = await play(Program(episode(make_trace())), 1, timeout_s=0.2, arrived=slow)
    assert done == rollouts and rollouts[0].error is None


async def test_the_rollouts_of_a_frozen_model_have_no_version_and_no_logprobs(play, make_trace):
    (rollout,), _ = await play(Program(episode(make_trace())), 1, pool=Frozen)
    assert (rollout.start_version, rollout.end_version) == (None, None) and not rollout.live
    (sample,) = rollout.samples
    assert any(sample.mask) and sample.logprobs == [0.0] * len(sample.mask)
    (rollout,), _ = await play(Program(episode(make_trace())), 1)
    assert (rollout.start_version, rollout.end_version) == (3, 3) and any(rollout.samples[0].logprobs)


async def hang():
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (lambda make: episode(make(ok=False)), "stopped: None"),
        (lambda make: episode(make(reward=float("nan"))), "ValueError: the grader gave reward nan"),
        (lambda make: episode(make(reward=-1e39)), "ValueError: the grader gave reward -1e+39"),
        (lambda make: episode(make(), errors=[vf.Error(type="ToolError", message="no tool")]), "ToolError: no tool"),
        (lambda make: episode(errors=[vf.Error(type="SandboxError", message="gone")]), "SandboxError: gone"),
        (lambda make: episode(), "the episode left no trace"),
        (lambda make: episode(make(trainable=False)), "the episode left no trace"),
        (lambda make: hang, "TimeoutError: no end after 0.2 s (timeout_s or group_timeout_s of envs.toy)"),
    ],
)
async def test_an_episode_that_fails_is_an_errored_rollout_with_its_reason(play, make_trace, made, error):
    rollouts, _ = await play(Program(made(make_trace), episode(make_trace())), 2, timeout_s=0.2)
    bad, fine = rollouts
    assert error in bad.error and not bad.samples
    assert fine.error is None and fine.samples, "its sibling is none the worse"


async def slips():
    raise asyncio.CancelledError


async def exits():
    raise SystemExit(3)


@pytest.mark.parametrize(("slip", "name"), [(slips, "CancelledError"), (exits, "SystemExit")])
async def test_what_an_envs_code_lets_slip_costs_its_own_episode(play, make_trace, slip, name):
    (bad, fine), arrived = await play(Program(slip, episode(make_trace())), 2)
    assert (bad.error, bad.error_kind) == (f"RuntimeError: the env's code let {name} escape", "env") and not bad.samples
    assert fine.error is None and fine.samples and len(arrived) == 2


async def test_a_group_that_somebody_cancels_is_cancelled(play, make_trace):
    arrived = []

    async def note(rollout):
        arrived.append(rollout.error)

    group = asyncio.create_task(play(Program(hang, slips), 2, arrived=note))
    await asyncio.sleep(0.05)
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(group, 3)
    assert arrived == ["RuntimeError: the env's code let CancelledError escape"], (
        "the other one is no failure of the env"
    )


@pytest.mark.parametrize(
    ("recorded", "kind"),
    [
        ({"type": "ProviderError", "status_code": 400}, "overlong_prompt"),
        ({"type": "ProviderError", "status_code": 503}, "engine"),
        ({"type": "EngineError"}, "engine"),
        ({"type": "OverlongPrompt"}, "overlong_prompt"),
        ({"type": "MalformedToolCall"}, "tool_call"),
        ({"type": "RolloutTimeout"}, "timeout"),
        ({"type": "EnvError"}, "env"),
        ({"type": "KeyError", "status_code": 400}, "env"),
    ],
)
async def test_what_verifiers_recorded_says_what_kind_of_failure_it_is(play, make_trace, recorded, kind):
    (rollout,), _ = await play(Program(episode(make_trace(), errors=[vf.Error(message="why", **recorded)])), 1)
    assert rollout.error == f"EpisodeError: {recorded['type']}: why" and rollout.error_kind == kind


async def test_a_trace_that_ended_badly_says_so_itself(play, make_trace):
    trace = make_trace(ok=False)
    trace.record_error(MalformedToolCall("unclosed"))
    (rollout,), _ = await play(Program(episode(trace)), 1)
    assert rollout.error == "EpisodeError: MalformedToolCall: unclosed" and rollout.error_kind == "tool_call"


def test_the_policy_is_reached_with_its_version_as_salt_and_the_runs_token(make_sampler):
    context = model_context(make_sampler(temperature=0.7, max_tokens=9), "toy/k/0/0")
    assert context.model == "policy" and context.client.api_key_var == "PRL_TOKEN"
    assert context.client.base_url in ("http://a:1/v1", "http://b:2/v1")
    asked = context.sampling.model_dump(exclude_none=True)
    assert (asked["cache_salt"], asked["temperature"], asked["max_tokens"]) == ("v3", 0.7, 9)


def test_a_frozen_model_is_reached_without_a_salt_and_without_anybodys_key(make_sampler, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    context = model_context(make_sampler(Frozen), "toy/k/0/0")
    assert context.model == "teacher" and "cache_salt" not in context.sampling.model_dump()
    assert context.client.api_key_var not in ("OPENAI_API_KEY", "PRIME_API_KEY", "PRL_TOKEN")


def test_the_episodes_of_a_group_are_spread_over_the_servers(make_sampler):
    sampler = make_sampler()
    assert len({model_context(sampler, f"toy/k/0/{i}").client.base_url for i in range(20)}) == 2
