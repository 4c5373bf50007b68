"""Play tasks through a verifiers `Env`: a multi-turn env in this process, or the one with verifiers' harness.

With the harness, tools, hooks on a runtime and several agents work as verifiers defines them: a program plays the task,
and reaches the model through verifiers' token-in/token-out client, so that traces carry the exact tokens. That is
slower than asking the engine directly, and used only for tasks that need it (`reason_for_harness`).
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import SecretStr
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.env import Env
from verifiers.v1.task import Task
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import Error, Trace
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment

from prl.episodes._verifiers_internals import TokenClientConfig
from prl.episodes.grading import check_reward
from prl.episodes.group import GroupRequest
from prl.episodes.isolation import ESCAPING_EXCEPTIONS, as_failure, as_finished
from prl.episodes.multi_turn import InProcessContext
from prl.episodes.tools import in_process
from prl.episodes.turn import agent_info, trace_task
from prl.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from prl.inference.sampler import Sampler

EpisodeContext: TypeAlias = InProcessContext | ModelContext
"""What the agents of an episode reach the model with."""

UNSET_VARIABLE = "PRL_NO_KEY"
"""For `api_key_var`, whose default reads a vendor's CLI configuration. The token is passed as a value instead."""


def reason_for_harness(taskset: Taskset, task: Task) -> str | None:
    """Return why a task of this taskset needs verifiers' harness; None if it can be played in this process."""
    cls = type(task)
    if not in_process([*taskset.toolsets(taskset.config), *cls.toolsets(task.config)]):
        return "its tasks call tools that run in processes of their own"
    if cls.NEEDS_CONTAINER:
        return "its tasks need a container"
    for hook in ("setup", "finalize"):
        if getattr(cls, hook) is not getattr(Task, hook):
            return f"its tasks have a {hook} hook that works on a runtime"
    for signal in (*task.hooks("reward"), *task.hooks("metric")):
        runtime = inspect.signature(signal).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"{signal.__name__} reads a runtime"
    if task.plugged_judges():
        return "it has judges"
    if task.data.prompt is None:
        return "its tasks have no prompt: a simulated user opens the conversation"
    return None


def load_harness_env(taskset: str, args: dict[str, Any]) -> Env:
    """Load the verifiers env of an installed taskset: its own, else one agent that plays it with prl's chat harness."""
    cls = env_config_type(taskset)
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    if default_harness_id(taskset) == "bash":  # verifiers' fallback; a taskset's own harness is kept
        agent["harness"] = {"id": "prl"}
    agents = dict.fromkeys(agent_config_fields(cls()), agent)
    return load_environment(cls.model_validate({"taskset": {"id": taskset, **args}, **agents}))


def harness_context(sampler: "Sampler", key: str) -> ModelContext:
    """Describe the sampler's model to verifiers' client, which needs a server with vLLM's `/inference/v1/generate`.

    Cache entries of the policy carry the version that the episode starts from.

    Args:
        sampler: Whose model, renderer and sampling parameters the episode uses.
        key: Name of the episode among the requests of a run.
    """
    pool = sampler.pool
    sampling, salt = sampler.parameters(key), pool.cache_salt
    url = pool.urls[sampling["seed"] % len(pool.urls)]
    return ModelContext(
        model=pool.model,
        client=TokenClientConfig(
            base_url=f"{url}/v1",
            api_key_var=UNSET_VARIABLE,
            token=None if pool.token is None else SecretStr(pool.token),
            renderer=sampler.renderer.config,
            renderer_model_name=sampler.tokenizer_path,
        ),
        sampling=SamplingConfig.model_validate(sampling | ({"cache_salt": salt} if salt is not None else {})),
    )


async def play_episodes(
    env: Env, make_context: Callable[["Sampler", str], EpisodeContext], request: GroupRequest
) -> AsyncGenerator[Rollout, None]:
    """Play `request.n` episodes of one task; yield the rollouts of each as soon as it is graded or has failed.

    Every trainable trace of an episode is a rollout. The time that the consumer takes does not count towards
    `request.timeout_s`. Closing the generator cancels the episodes that still run.

    Args:
        env: What plays an episode.
        make_context: Makes what the env's agents reach the model with, of the sampler and the episode's name.
        request: The group.
    """

    async def episode(index: int) -> list[Rollout]:
        context = make_context(request.sampler, f"{request.key}/{index}")
        return await _play_episode(env, context, request, index)

    async with contextlib.aclosing(as_finished(map(episode, range(request.n)))) as finished:
        async for rollouts in finished:
            for rollout in rollouts:
                yield rollout


async def _play_episode(env: Env, context: EpisodeContext, request: GroupRequest, index: int) -> list[Rollout]:
    start_version = request.sampler.version
    traces, failure = await _run_episode(env, context, request)
    if not traces:
        traces = [Trace(task=trace_task(request.task), agent=agent_info("agent", True))]
        failure = failure or RuntimeError("the episode left no trace")
    rollouts = [request.new_rollout(trace, index, start_version) for trace in traces]
    for rollout in rollouts:
        rollout.end_version = request.sampler.version  # of verifiers' own client; prl's calls are recorded with theirs
        rollout.read_versions()
        try:
            if failure is not None:
                raise failure
            if not rollout.trace.ok:
                raise EpisodeError(rollout.trace.last_error, rollout.trace.stop_condition)
            check_reward(rollout.trace)
            rollout.attach_samples()
        except Exception as error:
            rollout.fail(error)
    return rollouts


async def _run_episode(
    env: Env, context: EpisodeContext, request: GroupRequest
) -> tuple[list[Trace], Exception | None]:
    """Return the trainable traces of an episode, and why it failed; what it left until then is kept to be read."""
    failure: Exception | None
    try:
        async with asyncio.timeout(request.timeout_s):
            episode = await env.run_episode(request.task, context)
    except ESCAPING_EXCEPTIONS as error:
        failure = as_failure(error)
    except TimeoutError:
        failure = request.timeout_error()
    else:
        failure = None
        if episode.errors:
            failure = getattr(context, "failure", None) or EpisodeError(episode.errors[-1])
        return _trainable(episode.traces), failure
    return _trainable(context.traces if isinstance(context, InProcessContext) else ()), failure


def _trainable(traces: Sequence[Trace]) -> list[Trace]:
    return [trace for trace in traces if trace.agent.trainable]


ERROR_KINDS = {
    "OverlongPrompt": "overlong_prompt",
    "MalformedToolCall": "tool_call",
    "EngineError": "engine",
    "ProviderError": "engine",
}
"""Kind of failure by the name of the exception that verifiers recorded; `timeout` or `env` for others."""


class EpisodeError(Exception):
    """A failure as verifiers recorded it on an episode or a trace, with its kind as prl counts them."""

    def __init__(self, recorded: Error | None, stop_condition: str | None = None):
        super().__init__(f"{recorded.type}: {recorded.message}" if recorded else f"stopped: {stop_condition}")
        name, status = (recorded.type, recorded.status_code) if recorded else ("", None)
        if name == "ProviderError" and status == 400:  # vLLM's reply to a prompt without room for an answer
            name = "OverlongPrompt"
        self.kind = ERROR_KINDS.get(name, "timeout" if "Timeout" in name else "env")
