"""Evaluation: `k` rollouts of every held-out task under the model that is loaded, in training and in `prl.eval`."""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from verifiers.v1.task import Task

from prl.config.model_folder import tokenizer_files
from prl.config.orchestrator import EvalConfig
from prl.config.schema import ModelConfig
from prl.orchestrator.early_stopping import EarlyStopping, held_out_reward, keep_best
from prl.orchestrator.metrics import mean
from prl.orchestrator.no_signal import what_to_look_at
from prl.orchestrator.state import SyncState
from prl.orchestrator.types import EvalEnv, TrainEnv
from prl.rollouts.records import write_records
from prl.rollouts.rollout import Rollout
from prl.transport.events import EVALUATING, Track
from prl.transport.files import FileTransport

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 256
"""Rollouts of an evaluation that the engine is asked for at once."""


class Evaluation(NamedTuple):
    """An evaluation that has ended."""

    version: int
    """The version that the engines had when it began."""
    metrics: dict[str, float]


@dataclass(eq=False)
class Evaluator:
    """Evaluates the versions of the policy that are due, between two steps or beside training, and keeps the best.

    While `every` is set, version 0, the last version, and each multiple of `every` that the run reaches or skips over
    are followed by one evaluation, of the version that is loaded then. No version is evaluated twice.
    """

    envs: Sequence[TrainEnv]
    config: EvalConfig
    early_stopping: EarlyStopping
    """Learns each held-out reward, and which is the best."""
    transport: FileTransport
    """Has the weights of the best version."""
    run_dir: Path
    model: ModelConfig
    """The policy before step 1, whose tokenizer goes beside the best version."""
    track: Track
    """Records evaluations that training waits for."""
    loaded: int = field(default=0, init=False)
    """The version that was loaded last and whose evaluation, if one was due, has ended."""
    latest: Evaluation = field(default=Evaluation(-1, {}), init=False)
    """The newest evaluation; of version -1 before the first."""
    _beside: asyncio.Task[Evaluation] | None = field(default=None, init=False)
    """The evaluation that runs beside training."""

    def __post_init__(self) -> None:
        # Read now: the model's folder may be another one, or gone, when a version is the best.
        remote = self.model.trust_remote_code
        self.tokenizer = tokenizer_files(self.model.path, trust_remote_code=remote) if self.config.keep_best else {}

    def load_state_dict(self, state: SyncState) -> None:
        """Go on from an earlier part of the run."""
        self.loaded = state.loaded
        self.latest = Evaluation(state.evaluated, state.evaluation)
        self.early_stopping.load_state_dict(state.stopping)

    async def evaluate_if_due(self, version: int, *, last: bool) -> dict[str, float]:
        """Evaluate `version`, which has been loaded, if an evaluation is due.

        Args:
            version: The version that is loaded. Those since the call before were skipped.
            last: It is the last version of the run.

        Returns:
            Metrics; empty if none was due, or if it runs beside training: `take_ended` has them then.
        """
        metrics: dict[str, float] = {}
        if self._is_due(version, last):
            if version and not last and self.config.mode == "beside":
                # One at a time; no track records it, since nothing waits for it.
                self._beside = self._beside or asyncio.create_task(self._evaluate(version))
            else:
                await self.close()
                with self.track.doing(EVALUATING, version):
                    self.latest = await self._evaluate(version)
                metrics = self.latest.metrics
                await self._judge(version, metrics)
        self.loaded = version
        return metrics

    def _is_due(self, version: int, last: bool) -> bool:
        every = self.config.every
        if every is None or version == self.latest.version:
            return False
        # One that was due while another ran beside training, or was given up, is made up for: nothing has ended since.
        since = self.loaded if self.config.mode == "pause" else max(0, self.latest.version)
        return last or version == 0 or version // every > since // every

    async def _evaluate(self, version: int) -> Evaluation:
        return Evaluation(version, await evaluate(self.envs, self.config, self.run_dir, version))

    async def _judge(self, version: int, metrics: dict[str, float]) -> None:
        """Tell early stopping of an evaluation, and keep the version if it is the best and `keep_best` is set."""
        reward = held_out_reward(metrics)
        if reward is None:  # no env has held-out tasks
            return
        if self.early_stopping.evaluated(version, reward) and self.config.keep_best:
            weights = await asyncio.to_thread(self.transport.weights_path, version)
            await asyncio.to_thread(keep_best, self.run_dir, weights, self.tokenizer, version, reward)

    def take_ended(self) -> dict[str, float]:
        """Return the metrics of the evaluation beside training if it has ended since the last call; {} if not.

        It becomes the latest. Raises what it raised.
        """
        if self._beside is None or not self._beside.done():
            return {}
        self.latest = self._beside.result()
        self._beside = None
        return self.latest.metrics

    async def close(self) -> None:
        """Give up the evaluation that runs beside training, if one does: the last version is evaluated anyway."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)
            self._beside = None


async def evaluate(envs: Sequence[TrainEnv], config: EvalConfig, run_dir: Path, version: int) -> dict[str, float]:
    """Evaluate the envs that have held-out tasks. Returns the metrics of `evaluate_env` of each.

    Warns of an env in which the model before training earns nothing.
    """
    metrics: dict[str, float] = {}
    for env in [env for env in envs if env.environment.eval_tasks]:
        rollouts, of_env = await evaluate_env(env, config.k, run_dir, version)
        metrics |= of_env
        if config.mode == "beside":
            # Training goes on beside it: the rollouts may be those of several versions.
            known = [(r.start_version, r.end_version) for r in rollouts if r.start_version is not None]
            metrics[f"eval/{env.name}/version_min"] = min((start for start, _ in known), default=version)
            metrics[f"eval/{env.name}/version_max"] = max(
                (end for start, end in known if end is not None), default=version
            )
        # Where every rollout failed, rewards say nothing.
        best = max((rollout.reward for rollout in rollouts if not rollout.failed), default=math.inf)
        if version == 0 and best <= 0 and env.algorithm.reads_reward:
            log.warning("env %s: the first evaluation earned nothing. %s", env.name, what_to_look_at(rollouts))
    return metrics


async def evaluate_env(env: EvalEnv, k: int, run_dir: Path, version: int) -> tuple[list[Rollout], dict[str, float]]:
    """Play `k` samples of every held-out task of an env, and record them in `rollouts/eval_<env>_step_<version>.jsonl`.

    Returns:
        The rollouts, in the order of the tasks; and `eval/<env>/avg@k`, the mean reward, a failed rollout counted as 0,
        its standard error over the tasks, the shares `eval/<env>/errored` and `eval/<env>/truncated`, and the env's
        metrics.
    """
    rollouts = await play_all(env, k)
    # A failed rollout earns 0. Left out, an env would look the better the more of them fail.
    metrics = {
        f"eval/{env.name}/avg@{k}": mean(0.0 if r.failed else r.reward for r in rollouts),
        f"eval/{env.name}/errored": mean(rollout.failed for rollout in rollouts),
        f"eval/{env.name}/truncated": mean(rollout.is_truncated for rollout in rollouts),
    }
    tasks: dict[int, list[float]] = {}
    for rollout in rollouts:
        tasks.setdefault(rollout.group_id, []).append(0.0 if rollout.failed else rollout.reward)
    if len(tasks) > 1:
        spread = float(np.std([mean(rewards) for rewards in tasks.values()], ddof=1))
        metrics[f"eval/{env.name}/stderr"] = spread / math.sqrt(len(tasks))
    for key in {key: None for rollout in rollouts if not rollout.failed for key in rollout.metrics}:
        values = [0.0 if rollout.failed else rollout.metrics.get(key) or 0.0 for rollout in rollouts]
        # A grader may have written nan, which would be the mean.
        metrics[f"eval/{env.name}/{key}"] = mean(filter(math.isfinite, values))
    write_records(run_dir, version, rollouts, f"eval_{env.name}_")
    return rollouts, metrics


async def play_all(env: EvalEnv, k: int) -> list[Rollout]:
    """Return `k` rollouts of every held-out task of an env, in the order of the tasks."""
    # A slot is a task: all of its samples are one request.
    slots = asyncio.Semaphore(max(1, MAX_IN_FLIGHT // k))

    async def play(index: int, task: Task) -> list[Rollout]:
        async with slots:  # the deadline of a rollout does not run while it waits for the engine to have room
            return await env.environment.play(task, k, env.eval_sampler, group_id=index, held_out=True)

    groups = await asyncio.gather(*(play(index, task) for index, task in enumerate(env.environment.eval_tasks)))
    return [rollout for group in groups for rollout in group]
