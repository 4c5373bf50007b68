"""Following the policy: each version that the trainer makes is loaded into the engines, and evaluated when it is time."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prl.errors import PrlError
from prl.inference.client import InferencePool
from prl.monitors.monitor import Monitor
from prl.orchestrator.checkpoints import Checkpoints
from prl.orchestrator.config import OrchestratorConfig
from prl.orchestrator.evaluate import evaluate
from prl.orchestrator.types import TrainEnv
from prl.wire import files

log = logging.getLogger(__name__)

POLL_S = 0.004
LARGE_GAP = 0.05  # nats; bfloat16 engines stay below it


@dataclass
class Progress:
    """How far a run is: what the loop that makes batches and the one that follows the policy know of each other."""

    max_steps: int
    last_step: int
    """`max_steps`, or less once the tasks have run out."""
    shipped: int = 0
    """The last step whose batch the trainer has been given."""
    lines: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics of shipped steps that the trainer has not finished."""
    dropped: int = 0
    """Rollouts dropped for being too old since the last batch."""
    updating: bool = False
    updates_s: float = 0.0
    """Seconds spent on updates and the evaluations that follow them."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the other loop should look again."""


def no_policy(step: int, version: int, timeout_s: float) -> PrlError:
    return PrlError(
        f"step {step}: no policy newer than version {version} from the trainer within {timeout_s:g} s "
        "(orchestrator.policy_timeout_s)"
    )


class WeightSync:
    """Loads the trainer's versions into the engines; `drop_stale(version)` discards what that makes too old."""

    def __init__(
        self,
        config: OrchestratorConfig,
        envs: list[TrainEnv],
        pool: InferencePool,
        monitor: Monitor,
        checkpoints: Checkpoints,
        progress: Progress,
        drop_stale: Callable[[int], int],
        *,
        run_dir: Path,
        update_timeout_s: float,
    ):
        self.config = config
        self.envs = envs
        self.pool = pool
        self.monitor = monitor
        self.checkpoints = checkpoints
        self.progress = progress
        self.drop_stale = drop_stale
        self.run_dir = run_dir
        self.update_timeout_s = update_timeout_s
        self._evaluated: int | None = None
        """The last policy version that was evaluated."""
        self._last_line = 0.0
        """When the last step's line was made, or the first one's time began."""

    async def run(self) -> dict[str, float]:
        """Take note of each step the trainer finishes, and load the newest policy version that may be used.

        Returns the evaluation of the last version, if none was made of it as it was loaded.
        """
        announced = 0
        lines: list[dict[str, float]] = []
        waiting_since = self._last_line = time.monotonic()
        while self.pool.version < self.progress.last_step:
            if self.progress.shipped < self.progress.last_step:
                waiting_since = time.monotonic()  # until the last batch is out, it is `_collect` that waits
            while (trained := files.read_metrics(self.run_dir, announced + 1)) is not None:
                announced += 1
                lines.append(self._step_line(announced, trained))
                waiting_since = time.monotonic()
            self.checkpoints.complete(announced)
            newest = min(announced, self._newest_allowed())
            if newest > self.pool.version:
                lines[newest - self.pool.version - 1] |= await self._update(newest)
                while lines and lines[0]["step"] <= newest:
                    self.monitor.step(lines.pop(0))
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since > self.config.policy_timeout_s:
                raise no_policy(announced + 1, self.pool.version, self.config.policy_timeout_s)
            else:
                await asyncio.sleep(POLL_S)
        if self._evaluated != self.progress.last_step:  # when the last step was taken, nobody knew that it was
            return await self.evaluate(self.progress.last_step, since=self.progress.last_step)
        return {}

    def _newest_allowed(self) -> int:
        """The newest version to load: any, unless rollouts must start from exactly `max_async_level` versions back."""
        if not self.config.strict_async_level or self.progress.shipped == self.progress.last_step:
            return self.progress.max_steps
        return max(0, self.progress.shipped - self.config.max_async_level)

    async def _update(self, version: int) -> dict[str, float]:
        """Load `version`; nothing new starts meanwhile, so a rollout's start version is the one it ran under."""
        self.progress.updating = True
        started, old = time.monotonic(), self.pool.version
        path = files.weights_path(self.run_dir, version).resolve()
        await self.pool.update_weights(version, str(path), self.update_timeout_s)
        measured = {"time/update_weights": time.monotonic() - started}
        for gone in range(old, version):
            shutil.rmtree(files.weights_path(self.run_dir, gone), ignore_errors=True)
        self.progress.dropped += self.drop_stale(version)
        measured |= await self.evaluate(version, since=old)
        self.progress.updating = False
        self.progress.updates_s += time.monotonic() - started
        self.progress.changed.set()
        return measured

    def _step_line(self, step: int, trained: dict[str, float]) -> dict[str, float]:
        """The metrics of a step that the trainer has finished."""
        now = time.monotonic()
        wall, self._last_line = now - self._last_line, now
        line = {"step": step} | self.progress.lines.pop(step) | trained | {"time/step": wall}
        if not line["off_policy/max"] and line.get("logprob_gap/mean", 0.0) > LARGE_GAP:
            log.warning(
                "step %d is on-policy, yet sampler and trainer differ by %.3g a token: the engine does not run the "
                "trainer's weights",
                step,
                line["logprob_gap/mean"],
            )
        line["tokens/generated_per_second"] = line["tokens/generated"] / wall
        line["tokens/trained_per_second"] = line["tokens/trained"] / wall
        if not self.config.keep_batches:
            shutil.rmtree(files.batch_path(self.run_dir, step, 0).parent, ignore_errors=True)
        return line

    async def evaluate(self, version: int, since: int) -> dict[str, float]:
        """Evaluate `version` if one is due: a version may be skipped, an evaluation is not."""
        every = self.config.eval.every
        due = every is not None and (version // every > since // every or version in (0, self.progress.last_step))
        if not due:
            return {}
        self._evaluated = version
        return await evaluate(self.envs, self.config.eval, self.run_dir, version)
