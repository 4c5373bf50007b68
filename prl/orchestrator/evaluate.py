"""Evaluation on held-out tasks with the policy version that is loaded."""

import asyncio
import copy
import dataclasses
from pathlib import Path

from verifiers.v1.task import Task

from prl.inference.sampler import Sampler
from prl.orchestrator.config import EvalConfig
from prl.orchestrator.metrics import mean
from prl.orchestrator.types import TrainEnv
from prl.rollouts.records import write_eval_records
from prl.rollouts.rollout import Rollout

MAX_IN_FLIGHT = 256  # rollouts


async def evaluate(envs: list[TrainEnv], config: EvalConfig, run_dir: Path, version: int) -> dict[str, float]:
    """`eval/<env>/avg@k` over the env's held-out tasks, k samples each. A failed rollout counts as reward 0."""
    metrics: dict[str, float] = {}
    for env in envs:
        if not env.environment.eval_tasks:
            continue
        sampler = eval_sampler(env.policy_sampler, config)
        tasks = enumerate(env.environment.eval_tasks)
        turns = asyncio.Semaphore(max(1, MAX_IN_FLIGHT // config.k))

        async def play(index: int, task: Task) -> list[Rollout]:
            async with turns:  # a rollout's deadline does not run while it waits for the engine to have room
                return await env.environment.play(task, config.k, sampler, group_id=index)

        groups = await asyncio.gather(*(play(index, task) for index, task in tasks))
        rollouts = [rollout for group in groups for rollout in group]
        rewards = [0.0 if rollout.error else rollout.reward for rollout in rollouts]
        metrics[f"eval/{env.name}/avg@{config.k}"] = mean(rewards)
        metrics[f"eval/{env.name}/errored"] = mean(rollout.error is not None for rollout in rollouts)
        for key in {key: None for rollout in rollouts if not rollout.error for key in rollout.metrics}:
            values = [0.0 if rollout.error else rollout.metrics.get(key) or 0.0 for rollout in rollouts]
            metrics[f"eval/{env.name}/{key}"] = mean(values)
        write_eval_records(run_dir, version, env.name, rollouts)
    return metrics


def eval_sampler(sampler: Sampler, config: EvalConfig) -> Sampler:
    """The env's sampler at the evaluation's temperature."""
    temperature = sampler.config.temperature if config.temperature is None else config.temperature
    own = copy.copy(sampler)
    own.config = dataclasses.replace(sampler.config, temperature=temperature)
    return own
