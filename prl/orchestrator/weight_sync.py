"""Weight sync: load each policy version that the trainer publishes into the engines, and evaluate it when it is due."""

import asyncio
import contextlib
import time
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from prl.base.errors import PrlError
from prl.config.model_folder import tokenizer_files
from prl.config.orchestrator import OrchestratorConfig
from prl.config.schema import ModelConfig
from prl.engines.client import PolicyPool
from prl.monitors.base import Monitors
from prl.orchestrator.checkpoints import Checkpoints
from prl.orchestrator.early_stopping import EarlyStopping, held_out_reward, keep_best
from prl.orchestrator.evaluate import evaluate
from prl.orchestrator.metrics import line_of_step
from prl.orchestrator.state import SyncState
from prl.orchestrator.types import Event, TrainEnv
from prl.transport.events import EVALUATING, EVALUATION, Track
from prl.transport.files import FileTransport
from prl.weights.base import Weights

POLL_S = 0.004
"""Between two looks for a version that the trainer may be about to publish."""
IDLE_S = 0.1
"""Likewise while it has no batch: it can only write a checkpoint then."""


@dataclass
class WeightSync:
    """Follows the trainer from version to version.

    Invariants: versions are loaded in rising order. While `busy`, from before an update begins until its evaluation has
    ended, no group may start; an event follows. Every shipped step gets one metrics line, in order, once a version that
    contains it is loaded; the line that may be the last of a run that ends early waits until it is known to be or not,
    and is returned then.

    While `eval.every` is set, version 0, the last version, and each multiple of `every` that the run reaches or skips
    over are followed by one evaluation, of the version that is loaded then. No version is evaluated twice.

    A run that goes on begins with `load_state_dict`.
    """

    config: OrchestratorConfig
    pool: PolicyPool
    transport: FileTransport
    weights: Weights
    monitors: Monitors
    envs: list[TrainEnv]
    events: asyncio.Queue[Event]
    _: KW_ONLY
    checkpoints: Checkpoints
    run_dir: Path
    model: ModelConfig
    max_steps: int
    update_timeout_s: float
    half: bool
    track: Track = field(default_factory=lambda: Track(EVALUATION))

    def __post_init__(self) -> None:
        path, remote = self.model.path, self.model.trust_remote_code
        self._tokenizer_files = tokenizer_files(path, trust_remote_code=remote) if self.config.eval.keep_best else {}
        self.early_stopping = EarlyStopping(self.config.stop)
        self.last_step = self.max_steps
        """The last step of the run: `max_steps`, or less once every env has run out of tasks."""
        self.busy = False
        """Whether an update or an evaluation runs."""
        self.updates_s = 0.0
        """Seconds spent on updates and the evaluations that followed them."""
        self.shipped = 0
        """The last step whose batch has been shipped."""
        self.announced = 0
        """The last step that the trainer has finished."""
        self._batch_sent = asyncio.Event()
        self._lines: dict[int, dict[str, float]] = {}
        """Metrics of shipped steps that the trainer has not finished."""
        self._before = 0.0, 0.0
        """When the last line was made (of step 1: the run began), and the seconds of the engine's work by then."""
        self._trained: list[dict[str, float]] = []
        """Lines of finished steps that no monitor has."""
        self._evaluated = -1
        """The version that was evaluated last."""
        self.evaluation: dict[str, float] = {}
        """Its metrics."""
        self._beside: asyncio.Task[dict[str, float]] | None = None
        """The evaluation that runs beside training, and which version's it was as it began."""
        self._beside_of = 0
        self._loaded = 0
        """The version that was loaded last and whose evaluation, if one was due, has ended."""

    def state_dict(self) -> SyncState:
        """Return what is known now, for a checkpoint of the last step that the trainer has finished."""
        lines = [dict(line) for line in self._trained]
        return SyncState(self._loaded, self._evaluated, self.evaluation, lines, self.early_stopping.state_dict())

    def load_state_dict(self, state: SyncState, step: int) -> None:
        """Go on from the checkpoint of `step`, whose version the engines have loaded."""
        self.shipped = self.announced = step
        self._loaded = state.loaded
        self._evaluated = state.evaluated
        self.evaluation = state.evaluation
        self._trained = list(state.lines)
        self.early_stopping.load_state_dict(state.stopping)

    def expect(self, step: int, line: dict[str, float]) -> None:
        """The batch of `step` has been shipped: its version will come, and `line` are the metrics of its rollouts."""
        self.shipped = step
        self._lines[step] = line
        self._batch_sent.set()

    async def run(self) -> dict[str, float]:
        """Follow the trainer until the last version is loaded.

        Returns:
            For the last line of a run that ends early: what is known of it, where it has not been handed on, and the
            evaluation of the last version, if it was not known to be the last when it was loaded.

        Raises:
            PrlError: The trainer published no version within `policy_timeout_s`, or an engine did not load one.
        """
        try:
            line = await self._follow()
            self.weights.end()
            return line
        finally:
            await self._drop_beside()

    async def _follow(self) -> dict[str, float]:
        waiting_since = time.monotonic()
        self._before = waiting_since, self.pool.traffic.busy_s
        if self._loaded < self.pool.version:  # the run goes on, and its first version is not evaluated yet
            await self._evaluate_loaded()
            self.events.put_nowait(None)
            self._hand_on()
        while self.pool.version < self.last_step:
            if self.shipped < self.last_step:
                waiting_since = time.monotonic()  # until the last batch is shipped, collecting it has the deadlines
            if self.catch_up():
                waiting_since = time.monotonic()
            newest = self.announced
            if self.config.strict_async_level and self.shipped < self.last_step:  # start from exactly that far back
                newest = min(newest, max(0, self.shipped - self.config.max_async_level))
            if newest > self.pool.version:
                await self._update(newest)
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since > self.config.policy_timeout_s:
                raise no_policy(self.announced + 1, self.pool.version, self.config.policy_timeout_s)
            else:
                await self._pause()
            self._hand_on()
        line = self._trained.pop(0) if self._trained else {}
        line |= await self.evaluate_if_due(self.last_step, since=self.last_step, last=True)
        return line

    def end(self) -> None:
        """Tell the trainer that no batch follows."""
        self.transport.send_end(self.shipped)
        self.weights.end()

    async def _pause(self) -> None:
        """Wait until the trainer may have published something, or written a checkpoint."""
        if self.announced < self.shipped:
            return await asyncio.sleep(POLL_S)
        self._batch_sent.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S):
                await self._batch_sent.wait()

    def catch_up(self) -> bool:
        """Take in what the trainer has published, and tell its checkpoints what is known at each step. Returns at once.

        Returns:
            Whether there was anything.
        """
        before = self.announced
        while True:
            trained = self.transport.receive_metrics(self.announced + 1)
            if self.checkpoints.awaited(self.announced, passes=trained is not None):
                self.checkpoints.sync(self.announced, self.state_dict())
            if trained is None:
                return self.announced > before
            self.checkpoints.passed(self.announced)
            self.announced += 1
            self._trained.append(self._finished(self.announced, trained))

    def _hand_on(self) -> None:
        """Give the monitors the lines of the steps whose versions are loaded, less the one that may be the last."""
        while (lines := self._trained) and lines[0]["step"] <= self.pool.version:
            if self._may_be_last(lines[0]["step"]):
                return
            self.monitors.step(lines[0])  # one that fails does not lose it: a checkpoint has the lines that are left
            del lines[0]

    def _may_be_last(self, step: float) -> bool:
        """Return whether the run may end early after `step`."""
        ending = self.early_stopping.reason is not None or self.last_step < self.max_steps
        return ending and step == self.shipped < self.max_steps

    async def _update(self, version: int) -> None:
        """Load `version` and evaluate it if that is due; its line gets the metrics of both."""
        self.busy = True
        started, before = time.monotonic(), self.pool.version
        await self.weights.load(self.pool, version, self.update_timeout_s)
        self._line_of(version)["time/update_weights"] = time.monotonic() - started
        for old in range(before, version):
            self.transport.discard_weights(old)
        self.early_stopping.trained(version)
        await self._evaluate_loaded()
        self.busy = False
        self.updates_s += time.monotonic() - started
        self.events.put_nowait(None)

    async def _evaluate_loaded(self) -> None:
        """Evaluate the version that is loaded if that is due; its line gets the metrics."""
        version, self.busy = self.pool.version, True
        # One beside training may have been given up, or be due since another ran.
        since = self._loaded if self.config.eval.mode == "pause" else max(0, self._evaluated)
        metrics = await self.evaluate_if_due(version, since=since, last=version == self.last_step)
        self._line_of(version).update(metrics)
        self._loaded, self.busy = version, False

    def _line_of(self, version: int) -> dict[str, float]:
        return next((line for line in self._trained if line["step"] == version), {})

    async def evaluate_if_due(self, version: int, *, since: int, last: bool) -> dict[str, float]:
        """Evaluate `version` if an evaluation is due.

        Args:
            version: The version that is loaded.
            since: The version that was loaded before it: those in between were skipped.
            last: Whether it is the last version of the run.

        Returns:
            Metrics; empty if none was due, or if it runs beside training: a later line has them then.
        """
        every = self.config.eval.every
        due = every is not None and (last or version == 0 or version // every > since // every)
        if not due or version == self._evaluated:
            return {}
        if self.config.eval.mode == "beside" and version and not last:
            if self._beside is None:  # on no track: nothing waits for it
                self._beside = asyncio.create_task(evaluate(self.envs, self.config.eval, self.run_dir, version))
                self._beside_of = version
            return {}
        await self._drop_beside()
        with self.track.doing(EVALUATING, version):
            metrics = await evaluate(self.envs, self.config.eval, self.run_dir, version)
        self._evaluated, self.evaluation = version, metrics
        reward = held_out_reward(metrics)  # no env may have held-out tasks
        is_best = reward is not None and self.early_stopping.evaluated(version, reward)
        if reward is not None and is_best and self.config.eval.keep_best:
            weights = await asyncio.to_thread(self.transport.weights_path, version)
            await asyncio.to_thread(keep_best, self.run_dir, weights, self._tokenizer_files, version, reward)
        return metrics

    async def _drop_beside(self) -> None:
        """Give up the evaluation that runs beside training, if one does: the last version is evaluated anyway."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)
            self._beside = None

    def _finished(self, step: int, trained: dict[str, float]) -> dict[str, float]:
        """The line of a step that the trainer has finished."""
        (began, busy_s), self._before = self._before, (time.monotonic(), self.pool.traffic.busy_s)
        if not self.config.keep_batches:
            self.transport.discard_batch(step)
        shipped = {"step": step} | self._lines.pop(step) | self.pool.counts
        if self._beside is not None and self._beside.done():  # counts from now on, with its metrics: a resume has both
            self._evaluated, self.evaluation = self._beside_of, self._beside.result()
            self._beside = None
            shipped |= self.evaluation
        return line_of_step(shipped, trained, self._before[0] - began, self._before[1] - busy_s, half=self.half)


def no_policy(step: int, version: int, timeout_s: float) -> PrlError:
    """The error for a policy version that did not come."""
    return PrlError(
        f"step {step}: no policy newer than version {version} from the trainer within {timeout_s:g} s "
        "(orchestrator.policy_timeout_s)"
    )
