"""A group, `n` attempts at one task: played, graded, and returned as rollouts.

Single turns, a prompt and a reply without a tool or another party in between, all start from the same prompt, so the
whole group is one request for `n` completions (`play_group`). Everything else is an episode of a verifiers `Env`:
a multi-turn env in this process, or the one with verifiers' harness (`play_episodes`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.dialects.chat import message_to_wire

from prl.base.errors import EngineError
from prl.engines.chat import Dialogue
from prl.engines.renderer import UnrenderablePrompt, input_of, render_prompt
from prl.engines.sampler import OverlongPrompt, Sampler, whose
from prl.envs._verifiers_internals import BUILD
from prl.envs.grading import grade
from prl.envs.isolation import as_failure, run_all
from prl.envs.multi_turn import InProcessContext
from prl.envs.turn import (
    AGENT,
    commit,
    commit_sibling,
    declared_tools,
    opening_messages,
    refuse_placeholders,
    trace_task,
)
from prl.rollouts.rollout import TURN_REWARDS, Rollout
from prl.transport import events

log = logging.getLogger(__name__)

MakeContext = Callable[[Sampler, str], InProcessContext | vf.ModelContext]
"""(sampler, name of the episode) -> what its agents reach the model with."""

Arrived = Callable[[Rollout], Awaitable[None]]

MAX_REWARD = 3e38
"""Largest reward by absolute value: credit is a difference of rewards, and must be finite in float32."""


async def nothing_more(_: Rollout) -> None:
    """Do nothing with a rollout that has arrived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """A group to be played."""

    env_name: str
    task: vf.Task
    n: int
    """Number of attempts."""
    sampler: Sampler
    group_id: int
    timeout_s: float
    """[s] Time for an attempt, its grading included; infinite where there is no limit."""
    arrived: Arrived = nothing_more
    """Awaited with each rollout as soon as it is graded or has failed, while others are still played."""

    @property
    def key(self) -> str:
        """Name of the group among the requests of a run, from which seeds are derived."""
        return f"{self.env_name}/{self.task.key}/{self.group_id}"

    def new_rollout(self, trace: vf.Trace, index: int, start_version: int | None) -> Rollout:
        """Return the rollout of attempt `index` over `trace`, which was begun under policy version `start_version`."""
        return Rollout(
            trace,
            env_name=self.env_name,
            group_id=self.group_id,
            start_version=start_version,
            temperature=self.sampler.temperature,
            index=index,
        )

    def timeout_error(self, waited_for: str = "") -> TimeoutError:
        """Return the error of an attempt that took longer than `timeout_s`, and what it waited for then, if known."""
        return TimeoutError(
            f"not finished after {self.timeout_s:g} s (timeout_s or group_timeout_s of envs.{self.env_name})"
            + (f", waiting for {waited_for}" if waited_for else "")
        )


def complete(rollout: Rollout) -> None:
    """Attach the samples of a graded rollout; raise ValueError for rewards that credit cannot be computed from.

    These are rewards that would make it infinite, and a list of rewards that is not as long as the turns.
    """
    trace = rollout.trace
    if not abs(trace.reward) <= MAX_REWARD:  # NaN neither
        parts = ", ".join(f"{name}: {reward.value}" for name, reward in trace.rewards.items() if reward is not None)
        raise ValueError(f"the grader gave reward {trace.reward} ({parts})")
    for name, rewards in trace.info.get(TURN_REWARDS, {}).items():
        if len(rewards) != trace.num_turns or not sum(map(abs, rewards)) <= MAX_REWARD:
            raise ValueError(f"{name} returned {len(rewards)} rewards for {trace.num_turns} turns: {rewards}")
    rollout.attach_samples()


async def play_group(request: GroupRequest) -> list[Rollout]:
    """Play a group of single turns; return its rollouts, each graded and with its samples, or failed.

    A rollout goes to `request.arrived` as soon as it is graded; that takes none of the time of `request.timeout_s`.
    """
    sampler, task = request.sampler, trace_task(request.task)
    messages, tools = opening_messages(request.task.data), declared_tools(request.task.data)
    traces = [vf.Trace(task=task, agent=AGENT, verifiers=BUILD) for _ in range(request.n)]
    rollouts = [request.new_rollout(trace, index, sampler.version) for index, trace in enumerate(traces)]
    deadline = asyncio.get_running_loop().time() + request.timeout_s
    started = events.now()
    try:
        rendered = render_prompt(sampler.renderer, [message_to_wire(message) for message in messages], tools)
        async with asyncio.timeout_at(deadline):
            dialogue = Dialogue(messages, tools, request.task.data)
            completions = await sampler.complete(input_of(rendered), n=request.n, key=request.key, dialogue=dialogue)
    except (EngineError, OverlongPrompt, TimeoutError, UnrenderablePrompt) as error:
        if isinstance(error, UnrenderablePrompt):
            log.warning("env %s: task %s fails: %s", request.env_name, request.task.key, error)
        late = isinstance(error, TimeoutError)
        for rollout in rollouts:
            rollout.fail(request.timeout_error(whose(sampler.pool)) if late else error)
            await request.arrived(rollout)
        return rollouts
    span = vf.TimeSpan(start=started, end=events.now())
    # The prompt is hashed and put into a graph once; the other replies are added beside the first.
    first = rollouts[0].trace
    for rollout, completion in zip(rollouts, completions, strict=True):
        if rollout.trace is first:
            commit(graph.prepare_turn(first, messages), rendered, completion, sampler, span, tools=tools)
        else:
            commit_sibling(rollout.trace, first, rendered, completion, sampler, span, tools)
        rollout.read_versions()
    await run_all(_grade(request, rollout, deadline) for rollout in rollouts)
    return rollouts


async def _grade(request: GroupRequest, rollout: Rollout, deadline: float) -> None:
    """Grade a finished rollout, attach its samples and hand it on.

    An exception of the env's reward functions, or their delay beyond `deadline`, fails this rollout only. So does being
    cancelled: by themselves, or by a group that is closed.
    """
    clock = asyncio.timeout_at(deadline)
    try:
        refuse_placeholders(rollout.trace, request.sampler.renderer)
        async with clock:
            await grade(request.task, rollout.trace)
        if clock.expired():  # the cancelled grader has gone on
            raise request.timeout_error()
        complete(rollout)
        rollout.trace.ok = rollout.trace.is_completed = True
    except BaseException as error:  # a Rust extension's panic, for one, is no Exception
        rollout.fail(request.timeout_error() if clock.expired() else as_failure(error))
    await request.arrived(rollout)


async def play_episodes(env: vf.Env, make_context: MakeContext, request: GroupRequest) -> list[Rollout]:
    """Play `request.n` episodes of one task; return the rollouts, in the order of the episodes.

    Every trainable trace of an episode is a rollout, which goes to `request.arrived` as soon as it is graded or has
    failed; that takes none of the time of `request.timeout_s`.

    Args:
        env: What plays an episode.
        make_context: Makes what the env's agents reach the model with.
        request: The group.
    """
    episodes = await run_all(_play_episode(env, make_context, request, index) for index in range(request.n))
    return [rollout for rollouts in episodes for rollout in rollouts]


async def _play_episode(env: vf.Env, make_context: MakeContext, request: GroupRequest, index: int) -> list[Rollout]:
    """Play an episode. One that fails leaves its traces until then, to be read; at least one."""
    context = make_context(request.sampler, f"{request.key}/{index}")
    start_version = request.sampler.version
    failure: Exception | None = None
    try:
        async with asyncio.timeout(request.timeout_s) as clock:
            episode = await env.run_episode(request.task, context)
        if clock.expired():  # what was cancelled has taken no notice
            raise request.timeout_error()
        traces = episode.traces
        if episode.errors:
            failure = getattr(context, "failure", None) or EpisodeError(episode.errors[-1])
    except BaseException as error:
        failure = request.timeout_error() if isinstance(error, TimeoutError) else as_failure(error)
        if failure is error:  # verifiers records the Exceptions of env code: this one is a bug
            raise
        traces = getattr(context, "traces", ())  # those of an env in this process
    rollouts = [request.new_rollout(trace, index, start_version) for trace in traces if trace.agent.trainable]
    if not rollouts:
        failure = failure or RuntimeError("the episode left no trace")
        rollouts = [request.new_rollout(vf.Trace(task=trace_task(request.task), agent=AGENT), index, start_version)]
    for rollout in rollouts:
        rollout.end_version = request.sampler.version  # of verifiers' own client; prl's calls are recorded with theirs
        rollout.read_versions()
        try:
            if failure is not None or not rollout.trace.ok:
                raise failure or EpisodeError(rollout.trace.last_error, rollout.trace.stop_condition)
            complete(rollout)
        except Exception as error:
            rollout.fail(error)
    await asyncio.gather(*map(request.arrived, rollouts))
    return rollouts


ERROR_KINDS = {
    "OverlongPrompt": "overlong_prompt",
    "EngineError": "engine",
    "ProviderError": "engine",
}
"""Kind of failure by the name of the exception that verifiers recorded; `timeout` or `env` for others."""


class EpisodeError(Exception):
    """A failure as verifiers recorded it on an episode or a trace, with its kind as prl counts them."""

    def __init__(self, recorded: vf.Error | None, stop_condition: str | None = None):
        super().__init__(f"{recorded.type}: {recorded.message}" if recorded else f"stopped: {stop_condition}")
        name, status = (recorded.type, recorded.status_code) if recorded else ("", None)
        if name == "ProviderError" and status == 400:  # a server's reply to a prompt without room for an answer
            name = "OverlongPrompt"
        self.kind = ERROR_KINDS.get(name, "timeout" if "Timeout" in name else "env")
