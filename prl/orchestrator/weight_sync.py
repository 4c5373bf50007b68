"""Weight sync: load each policy version that the trainer publishes into the engines."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from prl.base.errors import PrlError
from prl.config.orchestrator import OrchestratorConfig
from prl.engines.client import PolicyPool
from prl.orchestrator.checkpoints import Checkpoints
from prl.orchestrator.evaluate import Evaluator
from prl.orchestrator.state import SyncState
from prl.orchestrator.step_lines import StepLines
from prl.orchestrator.types import Event
from prl.transport.files import FileTransport
from prl.weights.base import Weights

POLL_S = 0.004
"""Seconds between two looks for a version that the trainer may be about to publish."""
IDLE_S = 0.1
"""Seconds between two looks while the trainer has no batch: it can only write a checkpoint then."""


@dataclass(eq=False)
class WeightSync:
    """Follows the trainer from version to version.

    Invariants: versions are loaded in rising order. While `busy`, from before an update begins until its evaluation has
    ended, no group may start; an event follows.
    """

    config: OrchestratorConfig
    pool: PolicyPool
    transport: FileTransport
    weights: Weights
    events: asyncio.Queue[Event]
    checkpoints: Checkpoints
    steps: StepLines
    evaluator: Evaluator
    update_timeout_s: float
    """Deadline for the engines to load weights, seconds."""
    busy: bool = field(default=False, init=False)
    """Whether an update or an evaluation that training waits for runs."""
    updates_s: float = field(default=0.0, init=False)
    """Seconds spent on updates and the evaluations that followed them."""

    def state_dict(self) -> SyncState:
        """Return what is known now, for a checkpoint of the last step that the trainer has finished."""
        evaluator = self.evaluator
        return SyncState(
            loaded=evaluator.loaded,
            evaluated=evaluator.latest.version,
            evaluation=evaluator.latest.metrics,
            lines=self.steps.state_dict(),
            stopping=evaluator.early_stopping.state_dict(),
        )

    def load_state_dict(self, state: SyncState, step: int) -> None:
        """Go on from the checkpoint of `step`, whose version the engines have loaded."""
        self.steps.load_state_dict(state.lines, step)
        self.evaluator.load_state_dict(state)

    async def run(self) -> dict[str, float]:
        """Follow the trainer until the last version is loaded.

        Returns:
            For the last line of a run that ends early: what is known of it, where it has not been handed on, and the
            evaluation of the last version, if it was not known to be the last when it was loaded.

        Raises:
            PrlError: The trainer published no version within `policy_timeout_s`, or an engine did not load one.
        """
        steps, evaluator = self.steps, self.evaluator
        steps.begin(self.pool.traffic.busy_s)
        try:
            if evaluator.loaded < self.pool.version:  # the run goes on, and its first version is not evaluated yet
                await self._update(self.pool.version)
            await self._follow()
            line = steps.take_kept_back() | await evaluator.evaluate_if_due(steps.last, last=True)
            # Not before: an engine that died in the evaluation takes the last version once more.
            self.weights.end()
            return line
        finally:
            await evaluator.close()

    async def _follow(self) -> None:
        steps = self.steps
        waiting_since = time.monotonic()
        while True:
            steps.hand_on(self.pool.version, stopping=self.evaluator.early_stopping.reason is not None)
            if self.pool.version >= steps.last:
                return
            collecting = steps.shipped < steps.last
            if self.catch_up() or collecting:  # until the last batch is shipped, collecting it has the deadlines
                waiting_since = time.monotonic()
            newest = steps.trained
            if self.config.strict_async_level and collecting:  # start from exactly that far back
                newest = min(newest, max(0, steps.shipped - self.config.max_async_level))
            if newest > self.pool.version:
                await self._update(newest)
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since > self.config.policy_timeout_s:
                raise no_policy(steps.trained + 1, self.pool.version, self.config.policy_timeout_s)
            else:
                await self._pause()

    async def _pause(self) -> None:
        """Wait until the trainer may have published something, or written a checkpoint."""
        if self.steps.trained < self.steps.shipped:
            return await asyncio.sleep(POLL_S)
        self.steps.batch_sent.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S):
                await self.steps.batch_sent.wait()

    def catch_up(self) -> bool:
        """Take in what the trainer has published, and tell its checkpoints what is known at each step. Returns at once.

        Returns:
            Whether there was anything.
        """
        before = self.steps.trained
        while True:
            step = self.steps.trained
            trained = self.transport.receive_metrics(step + 1)
            self.checkpoints.sync(step, self.state_dict, passes=trained is not None)
            if trained is None:
                return step > before
            if not self.config.keep_batches:
                self.transport.discard_batch(step + 1)
            # An evaluation that has ended beside training counts from here on, and this line has its metrics: a run
            # that is resumed from a checkpoint has both or neither.
            known = self.pool.counts | self.evaluator.take_ended()
            self.steps.train(known, trained, self.pool.traffic.busy_s)

    async def _update(self, version: int) -> None:
        """Load `version`, unless the engines have it, and evaluate it if that is due; its line gets the metrics."""
        self.busy = True  # a group that starts now would mix two versions, or delay the evaluation
        started = time.monotonic()
        if version > self.pool.version:
            seconds = await self._load(version)
            self.steps.add(version, {"time/update_weights": seconds})
            self.evaluator.early_stopping.trained(version)
        self.steps.add(version, await self.evaluator.evaluate_if_due(version, last=version == self.steps.last))
        self.busy = False
        self.updates_s += time.monotonic() - started
        # The collector may be waiting for this: groups may start again.
        self.events.put_nowait(None)

    async def _load(self, version: int) -> float:
        """Have the engines load the weights of `version`. Returns the seconds until the last of them had loaded."""
        started = time.monotonic()
        before = self.pool.version
        await self.weights.load(self.pool, version, self.update_timeout_s)
        seconds = time.monotonic() - started
        for old in range(before, version):  # those that were skipped, too
            self.transport.discard_weights(old)
        return seconds


def no_policy(step: int, version: int, timeout_s: float) -> PrlError:
    """The error for a policy version that did not come."""
    return PrlError(
        f"step {step}: no policy newer than version {version} from the trainer within {timeout_s:g} s "
        "(orchestrator.policy_timeout_s)"
    )
