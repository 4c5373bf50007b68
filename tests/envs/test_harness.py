"""Episodes that verifiers' own Env plays: its traces as rollouts, and with what it reaches the model."""

import asyncio
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from prl.engines.sampler import Sampler
from prl.envs.group import GroupRequest, play_episodes
from prl.envs.harness import ChatHarness, harness_context, reason_for_harness


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
    version = 3
    http = SimpleNamespace(token="s3cret", address=lambda number: Pool.urls[number % len(Pool.urls)])

    @property
    def cache_salt(self):
        return f"v{self.version}"


class Frozen(Pool):
    model = "teacher"
    version = cache_salt = None
    http = SimpleNamespace(token=None, address=Pool.http.address)


@pytest.fixture
def make_sampler(renderer):
    def make(pool=Pool, **sampling):
        sampler = Sampler(**sampling)
        sampler.attach(pool=pool(), renderer=renderer, max_model_len=64, seed=0, tokenizer_path="/models/t")
        return sampler

    return make


@pytest.fixture
def play(make_sampler):
    """`play(program, n)`: all rollouts, in the order of their episodes."""

    async def run(program, n, *, pool=Pool, timeout_s=5.0):
        task = vf.Task(vf.TaskData(idx=0, prompt="1+1="))
        request = GroupRequest(
            env_name="toy", task=task, n=n, sampler=make_sampler(pool), group_id=4, timeout_s=timeout_s
        )
        async with asyncio.timeout(10):
            return await play_episodes(program, lambda sampler, key: key, request)

    return run


async def test_each_trainable_trace_is_one_rollout(play, make_trace):
    program = Program(
        episode(make_trace("1", reward=0.1), make_trace("9", trainable=False)),
        episode(make_trace("2", reward=0.2), make_trace("3", reward=0.3)),
    )
    rollouts = await play(program, 2)
    assert [rollout.reward for rollout in rollouts] == [0.1, 0.2, 0.3] and not any(r.error for r in rollouts)
    assert [rollout.index for rollout in rollouts] == [0, 1, 1]
    assert all(len(rollout.samples) == 1 and rollout.group_id == 4 for rollout in rollouts)
    assert len(set(program.contexts)) == 2, "episodes are told apart"


async def test_frozen_model_rollouts_have_no_version_or_logprobs(play, make_trace):
    (rollout,) = await play(Program(episode(make_trace())), 1, pool=Frozen)
    assert (rollout.start_version, rollout.end_version) == (None, None) and not rollout.live
    (sample,) = rollout.samples
    assert any(sample.mask) and sample.logprobs == [0.0] * len(sample.mask)
    (rollout,) = await play(Program(episode(make_trace())), 1)
    assert (rollout.start_version, rollout.end_version) == (3, 3) and any(rollout.samples[0].logprobs)


async def hang():
    await asyncio.sleep(60)


async def exits():
    raise SystemExit(3)


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
        (lambda make: hang, "TimeoutError: not finished after 0.2 s (timeout_s or group_timeout_s of envs.toy)"),
        (lambda make: exits, "RuntimeError: the env's code let SystemExit escape: 3"),
    ],
)
async def test_failed_episode_is_an_errored_rollout_with_reason(play, make_trace, made, error):
    rollouts = await play(Program(made(make_trace), episode(make_trace())), 2, timeout_s=0.2)
    bad, fine = sorted(rollouts, key=lambda rollout: rollout.index)
    assert error in bad.error and not bad.samples
    assert fine.error is None and fine.samples, "its sibling is none the worse"


@pytest.mark.parametrize(
    ("recorded", "kind"),
    [
        ({"type": "ProviderError", "status_code": 400}, "overlong_prompt"),
        ({"type": "ProviderError", "status_code": 503}, "engine"),
        ({"type": "EngineError"}, "engine"),
        ({"type": "OverlongPrompt"}, "overlong_prompt"),
        ({"type": "RolloutTimeout"}, "timeout"),
        ({"type": "EnvError"}, "env"),
        ({"type": "KeyError", "status_code": 400}, "env"),
    ],
)
async def test_recorded_error_tells_the_kind_of_failure(play, make_trace, recorded, kind):
    (rollout,) = await play(Program(episode(make_trace(), errors=[vf.Error(message="why", **recorded)])), 1)
    assert rollout.error == f"EpisodeError: {recorded['type']}: why" and rollout.error_kind == kind


def test_policy_requests_carry_version_and_token(make_sampler):
    context = harness_context(make_sampler(temperature=0.7, max_tokens=9), "toy/k/0/0")
    assert context.model == "policy" and context.client.token.get_secret_value() == "s3cret"
    assert context.client.base_url in ("http://a:1/v1", "http://b:2/v1")
    asked = context.sampling.model_dump(exclude_none=True)
    assert (asked["cache_salt"], asked["temperature"], asked["max_tokens"]) == ("v3", 0.7, 9)


def test_frozen_model_requests_carry_no_salt_or_key(make_sampler, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    context = harness_context(make_sampler(Frozen), "toy/k/0/0")
    assert context.model == "teacher" and "cache_salt" not in context.sampling.model_dump()
    assert context.client.token is None
    assert context.client.api_key_var not in ("OPENAI_API_KEY", "PRIME_API_KEY", "PRL_TOKEN")


def test_episodes_of_a_group_are_spread_over_servers(make_sampler):
    sampler = make_sampler()
    assert len({harness_context(sampler, f"toy/k/0/{i}").client.base_url for i in range(20)}) == 2


# --- what needs verifiers' harness ------------------------------------------------------------------------------------


class Taskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield Graded(vf.TaskData(prompt="1+1="))


class Graded(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "2")


class ReadsRuntime(vf.Task):
    @vf.reward
    async def tests_pass(self, trace: vf.Trace, runtime) -> float:
        return 1.0


class MayReadRuntime(vf.Task):
    @vf.reward
    async def answer(self, trace: vf.Trace, runtime=None) -> float:
        return 1.0


async def hook(self, trace, runtime):
    pass


class Intercepts(vf.Task):
    @vf.intercept
    def guard(self, response: vf.Response) -> vf.Response | None:
        return None


class StopsAtReplies(vf.Task):
    @vf.stop
    def forbidden(self, response: vf.Response) -> bool:
        return "STOP" in (response.message.content or "")


class StopsByTrace(vf.Task):
    @vf.stop
    async def done(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (Graded, None),
        (MayReadRuntime, None),
        (type("Containered", (Graded,), {"NEEDS_CONTAINER": True}), "need a container"),
        (type("SetsUp", (Graded,), {"setup": hook}), "setup hook"),
        (type("Finalizes", (Graded,), {"finalize": hook}), "finalize hook"),
        (ReadsRuntime, "tests_pass reads a runtime"),
        (type("CallsTools", (Graded,), {"toolsets": lambda self, config: ["a tool server"]}), "call tools"),
        (type("NeedsUser", (Graded,), {}), "no prompt"),
        (Intercepts, "guard reads requests or replies"),
        (StopsAtReplies, "forbidden reads requests or replies"),
        (StopsByTrace, None),
    ],
)
def test_tasks_that_need_a_harness(task, reason):
    data = vf.TaskData(prompt=None if reason == "no prompt" else "1+1=")
    found = reason_for_harness(Taskset(vf.TasksetConfig(id="x")), task(data))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("prompt", "exports", "reason"),
    [
        (None, [], "no prompt"),
        (None, [vf.SingleAgentEnv], None),
        ("1+1=", [vf.SingleAgentEnv, ChatHarness], "a harness of its own, ChatHarness"),
    ],
)
def test_what_a_module_exports_says_who_leads(prompt, exports, reason):
    found = reason_for_harness(Taskset(vf.TasksetConfig(id="x")), Graded(vf.TaskData(prompt=prompt)), exports)
    assert found is None if reason is None else reason in found
