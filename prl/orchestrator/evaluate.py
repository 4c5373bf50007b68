"""Evaluation: `k` rollouts of every held-out task under the model that is loaded, in training and in `prl.eval`."""

import asyncio
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from verifiers.v1.task import Task

from prl.config.orchestrator import EvalConfig
from prl.orchestrator.metrics import mean
from prl.orchestrator.no_signal import what_to_look_at
from prl.orchestrator.types import EvalEnv, TrainEnv
from prl.rollouts.records import write_records
from prl.rollouts.rollout import Rollout

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 256
"""Rollouts of an evaluation that the engine is asked for at once."""


async def evaluate(envs: Sequence[TrainEnv], config: EvalConfig, run_dir: Path, version: int) -> dict[str, float]:
    """Evaluate the envs that have held-out tasks. Returns the metrics of `evaluate_env` of each.

    Warns of an env in which the model before training earns nothing.
    """
    metrics: dict[str, float] = {}
    for env in [env for env in envs if env.environment.eval_tasks]:
        rollouts, of_env = await evaluate_env(env, config.k, run_dir, version)
        metrics |= of_env
        if config.mode == "beside":
            known = [(r.start_version, r.end_version) for r in rollouts if r.start_version is not None]
            metrics[f"eval/{env.name}/version_min"] = min((start for start, _ in known), default=version)
            metrics[f"eval/{env.name}/version_max"] = max(
                (end for start, end in known if end is not None), default=version
            )
        best = max((rollout.reward for rollout in rollouts if not rollout.failed), default=math.inf)
        if version == 0 and best <= 0 and env.algorithm.reads_reward:
            log.warning("env %s: the first evaluation earned nothing. %s", env.name, what_to_look_at(rollouts))
    return metrics


async def evaluate_env(env: EvalEnv, k: int, run_dir: Path, version: int) -> tuple[list[Rollout], dict[str, float]]:
    """Play `k` samples of every held-out task of an env, and record them in `rollouts/eval_<env>_step_<version>.jsonl`.

    Returns:
        The rollouts, in the order of the tasks; and `eval/<env>/avg@k`, the mean reward, a failed rollout counted as 0,
        `eval/<env>/errored`, and the env's metrics.
    """
    rollouts = await play_all(env, k)
    metrics = {
        f"eval/{env.name}/avg@{k}": mean(0.0 if r.failed else r.reward for r in rollouts),
        f"eval/{env.name}/errored": mean(rollout.failed for rollout in rollouts),
    }
    for key in {key: None for rollout in rollouts if not rollout.failed for key in rollout.metrics}:
        values = [0.0 if rollout.failed else rollout.metrics.get(key) or 0.0 for rollout in rollouts]
        metrics[f"eval/{env.name}/{key}"] = mean(filter(math.isfinite, values))
    write_records(run_dir, version, rollouts, f"eval_{env.name}_")
    return rollouts, metrics


async def play_all(env: EvalEnv, k: int) -> list[Rollout]:
    """`k` rollouts of every held-out task of an env, in the order of the tasks."""
    slots = asyncio.Semaphore(max(1, MAX_IN_FLIGHT // k))

    async def play(index: int, task: Task) -> list[Rollout]:
        async with slots:  # the deadline of a rollout does not run while it waits for the engine to have room
            return await env.environment.play(task, k, env.eval_sampler, group_id=index, held_out=True)

    groups = await asyncio.gather(*(play(index, task) for index, task in enumerate(env.environment.eval_tasks)))
    return [rollout for group in groups for rollout in group]
