"""Play tasks through a verifiers `Env`: one that converses, or the one that runs a program around the model.

For a program, tools, hooks on a runtime and several agents work as verifiers defines them; the model is reached with its
token-in/token-out client, so that traces carry the exact tokens. Slower than asking the engine directly, and only used
where that is not enough.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.env import Env
from verifiers.v1.task import Task
from verifiers.v1.trace import AgentInfo, Error, Trace
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment

from prl.episodes.single_turn import AGENT, NOT_MEANT, Arrived, check_reward, meant, on_trace, too_late
from prl.inference.sampler import Sampler
from prl.rollouts.rollout import Rollout


def make_program(taskset: str, args: dict[str, Any]) -> Env:
    """The verifiers env of an installed taskset: its own, else one agent that plays it with prl's chat harness."""
    cls = env_config_type(taskset)
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    if default_harness_id(taskset) == "bash":  # verifiers' fallback; a taskset's own harness stays
        agent["harness"] = {"id": "prl"}
    roles = {name: agent for name in agent_config_fields(cls())}
    return load_environment(cls.model_validate({"taskset": {"id": taskset, **args}, **roles}))


async def play_program(
    program: Env,
    context: Callable[[Sampler, str], Any],
    env_name: str,
    task: Task,
    n: int,
    sampler: Sampler,
    *,
    group_id: int,
    timeout_s: float,
    arrived: Arrived,
) -> list[Rollout]:
    """`n` episodes of one task; each trainable trace is a rollout. ErrorBudget and `arrived` as in `play_group`.

    `context` makes what the env's agents reach the model with, from the sampler and the episode's name.
    """

    async def play(index: int) -> list[Rollout]:
        asked = context(sampler, f"{env_name}/{task.key}/{group_id}/{index}")
        rollouts = await _play(program, asked, env_name, task, sampler, group_id, timeout_s)
        await asyncio.gather(*(arrived(rollout) for rollout in rollouts))
        return rollouts

    return [rollout for rollouts in await asyncio.gather(*map(play, range(n))) for rollout in rollouts]


async def _play(
    program: Env, context: Any, env_name: str, task: Task, sampler: Sampler, group_id: int, timeout_s: float
) -> list[Rollout]:
    version = sampler.version

    def rollout_of(trace: Trace) -> Rollout:
        return Rollout(
            trace, env_name=env_name, group_id=group_id, start_version=version, temperature=sampler.config.temperature
        )

    error: Exception | None = None
    traces: list[Trace] = []
    try:
        async with asyncio.timeout(timeout_s):
            episode = await program.run_episode(task, context)
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if episode.errors:
            error = getattr(context, "failure", None) or EpisodeError(episode.errors[-1])
    except NOT_MEANT as slipped:
        error = meant(slipped)
        traces = [trace for trace in getattr(context, "traces", ()) if trace.agent.trainable]
    except TimeoutError:
        error = too_late(env_name, timeout_s)
        traces = [trace for trace in getattr(context, "traces", ()) if trace.agent.trainable]
    if not traces:
        traces = [Trace(task=on_trace(task), agent=AgentInfo.model_construct(**dict(AGENT)))]
        error = error or RuntimeError("the episode left no trace")
    rollouts = [rollout_of(trace) for trace in traces]
    for rollout in rollouts:
        rollout.end_version = sampler.version
        try:
            if error is not None:
                raise error
            if not rollout.trace.ok:
                raise EpisodeError(rollout.trace.last_error, rollout.trace.stop_condition)
            check_reward(rollout.trace)
            rollout.attach_samples()
        except Exception as failure:
            rollout.fail(failure)
    return rollouts


KINDS = {
    "OverlongPrompt": "overlong_prompt",
    "MalformedToolCall": "tool_call",
    "EngineError": "engine",
    "ProviderError": "engine",
}


class EpisodeError(Exception):
    """What verifiers recorded of a failure, with its kind as prl counts them."""

    def __init__(self, recorded: Error | None, stopped: str | None = None):
        super().__init__(f"{recorded.type}: {recorded.message}" if recorded else f"stopped: {stopped}")
        name, status = (recorded.type, recorded.status_code) if recorded else ("", None)
        if name == "ProviderError" and status == 400:  # what vLLM says to a prompt without room
            name = "OverlongPrompt"
        self.kind = KINDS.get(name, "timeout" if "Timeout" in name else "env")


def model_context(sampler: Sampler, key: str) -> ModelContext:
    """The sampler's model as verifiers' client sees it: a prl server, since that client wants `/inference/v1/generate`.

    The policy's cache entries carry the version the episode started from.
    """
    sampling, salt = sampler.parameters(key), sampler.pool.cache_salt
    url = sampler.pool.urls[sampling["seed"] % len(sampler.pool.urls)]
    return ModelContext(
        model=sampler.pool.model,
        client=TrainClientConfig(
            base_url=f"{url}/v1",
            api_key_var=sampler.pool.api_key_var or "PRL_NO_KEY",  # its default reads a vendor's configuration
            renderer=sampler.renderer.config,
            renderer_model_name=sampler.tokenizer_path,
        ),
        sampling=SamplingConfig.model_validate(sampling | ({"cache_salt": salt} if salt is not None else {})),
    )
