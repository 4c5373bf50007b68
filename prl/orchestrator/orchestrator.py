"""The orchestrator: tasks become rollouts, rollouts become batches, and new weights come back.

The road of a group, with the stage that moves it on below each arrow:

    task ------> IN FLIGHT ---------> FINISHED ------------> WAITING ------> IN BATCH ------------------> SHIPPED
        Dispatcher   |    credit.py:      |   ErrorBudget,      |    Batcher     |    post_batch filters,
        .start_group |    play, grade,    |   Intake.admit,     |    .cut        |    records, pack, send
                     |    score, credit   |   pre_batch filters,|                |
                     |                    |   Batcher.add       |                |
                     +-> CANCELLED        +-> DROPPED           +-> DROPPED      +-> not shipped, if nothing of the
                     |   stale, surplus       failed, empty,        stale,           batch trains
                     |                        difficulty,           surplus
                     +-> an exception         pre_filtered
                         ends the run

A group is whole on this road. Its rollouts leave one by one, each with one outcome (`prl.rollouts.outcome`), and are
recorded with the step at which the group ended. Three kinds of asyncio tasks run side by side: one for each group in
flight, `WeightSync.run`, and `Orchestrator._make_batches`, the one loop that moves groups on. The first two speak to
the loop through one queue of events (`prl.orchestrator.types`). An exception in any of them ends all.
"""

import asyncio
import contextlib
import logging
import math
import time
from pathlib import Path
from typing import Any, ClassVar

from prl.errors import PrlError
from prl.inference.client import InferencePool
from prl.monitors import Monitors
from prl.orchestrator.batch import MAX_EMPTY_BATCHES, Batch, EmptyBatches, decide
from prl.orchestrator.batcher import Batcher
from prl.orchestrator.checkpoints import Checkpoints
from prl.orchestrator.config import OrchestratorConfig
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.error_budget import ErrorBudget
from prl.orchestrator.evaluate import Evaluation
from prl.orchestrator.filters.base import apply_filters
from prl.orchestrator.intake import Intake
from prl.orchestrator.metrics import count, why_untrained
from prl.orchestrator.pacing import Pacing
from prl.orchestrator.packing import pack
from prl.orchestrator.report import StepReport
from prl.orchestrator.types import Event, Group, GroupFinished, PolicyUpdated, RunSummary, TrainEnv, task_group
from prl.orchestrator.weight_sync import WeightSync, no_policy
from prl.rollouts.outcome import Stage
from prl.rollouts.records import write_records
from prl.rollouts.rollout import Rollout
from prl.wire import MicroBatch, StepBatch
from prl.wire.transport import Transport

log = logging.getLogger(__name__)

PAUSE_S = 0.2


class Orchestrator:
    """Runs `max_steps` steps, or fewer if every env runs out of tasks. Step n turns policy version n-1 into version n.

    Invariants: batches are shipped in the order of their steps; the batch of step n holds no rollout that started from
    a version below n-1-`max_async_level`; every rollout that arrives before the last batch is shipped is recorded once,
    with one outcome.

    Args:
        envs: The envs of the run.
        pool: The live policy's engines.
        transport: The way to the trainer and back.
        monitors: Take one metrics line per step.
        run_dir: Where rollouts and checkpoints are written.
        max_steps: Steps of the run.
        seq_len: Tokens in a packed row.
        trainer_ranks: Ranks that a batch is split over.
        update_timeout_s: Deadline for an engine to load weights, seconds.
        **knobs: Fields of `OrchestratorConfig`.
    """

    Config: ClassVar = OrchestratorConfig
    """Its knobs."""

    def __init__(
        self,
        *,
        envs: list[TrainEnv],
        pool: InferencePool,
        transport: Transport,
        monitors: Monitors,
        run_dir: Path,
        max_steps: int,
        seq_len: int,
        trainer_ranks: int,
        update_timeout_s: float,
        **knobs: Any,
    ):
        self.config = config = OrchestratorConfig(**knobs)
        self.envs = envs
        self.filters = {env.name: env.filters for env in envs}
        self.pool = pool
        self.transport = transport
        self.monitors = monitors
        self.run_dir = run_dir
        self.max_steps = max_steps
        self.seq_len = seq_len
        self.trainer_ranks = trainer_ranks
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.dispatcher = Dispatcher(envs, self.events)
        self.error_budget = ErrorBudget([env.name for env in envs], config.max_error_share)
        self.intake = Intake(envs)
        self.batcher = Batcher(config.batch_size, config.token_batch_size)
        self.pacing = Pacing(config, envs, pool, self.dispatcher, self.batcher, max_steps)
        self.checkpoints = Checkpoints(run_dir, envs)
        self.weight_sync = WeightSync(
            config,
            pool,
            transport,
            monitors,
            self.checkpoints,
            Evaluation(envs, config.eval, run_dir),
            self.events,
            max_steps=max_steps,
            update_timeout_s=update_timeout_s,
        )
        self.shipped = 0
        """The last step whose batch has been shipped."""
        self._summary = RunSummary(max_steps, None)
        self._report = StepReport()
        self._left: list[Rollout] = []
        """Rollouts of groups that no batch holds; recorded with the next batch."""
        self._empty_batches = EmptyBatches()

    async def run(self) -> RunSummary:
        """Train. Returns when the last policy version is loaded and evaluated."""
        async with contextlib.AsyncExitStack() as serving:
            for env in self.envs:
                serving.push_async_callback(env.close)
            await asyncio.gather(*(env.setup() for env in self.envs))
            for env in self.envs:
                await serving.enter_async_context(env.environment.serving())
            self.monitors.step({"step": 0} | await self.weight_sync.evaluate_base())
            async with self.dispatcher.running(), task_group() as loops:
                loops.create_task(self._make_batches())
                synced = loops.create_task(self.weight_sync.run())
            if self._summary.ended_because is not None:  # one more line, for what arrived after the last batch
                line = {"step": self._summary.last_step} | self.error_budget.take() | self.intake.take()
                self.monitors.step(line | synced.result())
        return self._summary

    def finish(self) -> None:
        """Complete the last checkpoint. To be called after the trainer, which writes it, has ended."""
        self.checkpoints.complete(self._summary.last_step)

    # --- the road -------------------------------------------------------------------------------------------------

    async def _make_batches(self) -> None:
        """Collect, cut, filter, record, pack and ship one batch after the other."""
        while self.shipped < self.max_steps:
            step = self.shipped + 1
            self._report.times.update(await self._collect(step))
            groups = self.batcher.cut(-math.inf if self.pacing.oversamples else self.pacing.last_chance(step))
            if not groups:
                return self._end_early()
            batch = decide(groups, self.filters, self.seq_len)
            if batch.trained and self.pacing.oversamples:
                self._drop_surplus(step)
            self._record(step, batch)
            rows, truncated = self._packed(step, batch)
            self._empty_batches.add(step, batch)
            if batch.trained:
                self._ship(step, rows, truncated)

    async def _collect(self, step: int) -> dict[str, float]:
        """Start groups and take in finished ones until the batch of `step` is complete, or no task is left to start.

        Returns:
            Where the time went, seconds.
        """
        started, updates_s, idle_s = time.monotonic(), self.weight_sync.updates_s, 0.0
        while True:
            while not self.events.empty():
                self._handle(self.events.get_nowait())
            self._check_limits(step)
            if self.pacing.complete(step) or self.pacing.out_of_tasks():
                return {"time/rollout": time.monotonic() - started - idle_s, "time/wait_for_policy": idle_s}
            before = time.monotonic()
            if not (self.weight_sync.busy or self.pacing.fill(self.shipped)):
                # Every env waits for a frozen model, which has a deadline of its own.
                await asyncio.sleep(PAUSE_S)
                idle_s += time.monotonic() - before
            elif self.dispatcher.in_flight:  # the deadline of a batch leaves out what is not the rollouts' time
                generating_s = before - started - idle_s - (self.weight_sync.updates_s - updates_s)
                await self._wait(self.config.batch_timeout_s - generating_s, self._no_batch(step))
            else:  # each wait for a policy version has the whole deadline
                timeout_s = self.config.policy_timeout_s
                await self._wait(timeout_s, no_policy(step, self.pool.version, timeout_s))
                idle_s += time.monotonic() - before

    async def _wait(self, timeout_s: float, error: PrlError) -> None:
        """Handle the next event. Raises `error` if none comes in time, unless an update or an evaluation is running."""
        try:
            async with asyncio.timeout(timeout_s):
                event = await self.events.get()
        except TimeoutError:
            if not self.weight_sync.busy:
                raise error from None
            event = await self.events.get()
        self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case GroupFinished(group):
                self._take_in(group)
            case PolicyUpdated(version):
                self._drop_stale(version)
            # GroupCancelled and GenerationResumed only wake the loop: there is room to start another group.

    def _take_in(self, group: Group) -> None:
        """Count a finished group and let it wait for a batch, or drop it."""
        self.error_budget.add(group)
        if self.intake.admit(group):
            apply_filters(self.filters[group.env_name], "pre_batch", group.rollouts)
            if self.batcher.add(group):
                return
        self._left += group.rollouts

    def _record(self, step: int, batch: Batch) -> None:
        write_records(self.run_dir, step, [*batch.rollouts, *self._left])
        self._report.add(batch, self._left)
        self._left = []

    def _packed(self, step: int, batch: Batch) -> tuple[list[list[MicroBatch]], int]:
        """The rows of each rank, and how many samples were cut to `seq_len`."""
        samples = [sample for rollout in batch.to_ship for sample in rollout.samples]
        try:
            return pack(samples, self.seq_len, self.trainer_ranks)
        except ValueError as error:  # samples hold what the user's algorithm wrote
            raise PrlError(f"step {step}: {error}") from error

    def _ship(self, step: int, rows: list[list[MicroBatch]], truncated: int) -> None:
        for rank, micro_batches in enumerate(rows):
            self.transport.send_batch(StepBatch(step, micro_batches, truncated), rank)
        line = self._report.line(step, self.filters, oversamples=self.pacing.oversamples)
        self.weight_sync.expect(step, line | self.error_budget.take() | self.intake.take())
        self.shipped, self._report = step, StepReport()
        if truncated:
            log.warning("step %d: %d samples cut to trainer.seq_len=%d tokens", step, truncated, self.seq_len)

    def _end_early(self) -> None:
        """Make the last shipped step the last of the run: no env has a task left."""
        tasks = ", ".join(f"{env.name}: {env.buffer.describe()}" for env in self.envs)
        self._summary = RunSummary(self.shipped, f"every env has run out of tasks ({tasks})")
        self.transport.send_end(self.shipped)
        self.weight_sync.end_after(self.shipped)
        log.warning("the run ends after step %d of %d: %s", self.shipped, self.max_steps, self._summary.ended_because)
        if self._left:
            write_records(self.run_dir, self.shipped, self._left)

    # --- limits and drops -------------------------------------------------------------------------------------

    def _check_limits(self, step: int) -> None:
        """Raise PrlError if too many rollouts failed, or if filters have dropped everything for too long."""
        self.error_budget.check(step)
        limit = MAX_EMPTY_BATCHES * self.pacing.batch_rollouts
        if self.batcher.filtered_in_a_row >= limit:
            outcomes = [(rollout, rollout.outcome) for rollout in self._left]
            dropped = [rollout for rollout, end in outcomes if end is not None and end.stage is Stage.PRE_FILTERED]
            raise PrlError(
                f"step {step}: filters.pre_batch dropped {self.batcher.filtered_in_a_row} rollouts in a row "
                f"({why_untrained(dropped)}), enough for {MAX_EMPTY_BATCHES} batches"
            )
        self.intake.check(limit)

    def _drop_stale(self, version: int) -> None:
        """Drop groups that are too old now that the engines run `version`."""
        stale = self.batcher.drop_stale(version, self.config.age_limit)
        in_flight = self.dispatcher.drop_stale(version, self.config.age_limit)
        self._report.stale += in_flight + count(stale, Stage.STALE)
        self._left += stale

    def _drop_surplus(self, step: int) -> None:
        """Drop groups that no step after `step` may train on."""
        last_chance = math.inf if step == self.max_steps else self.pacing.last_chance(step)
        surplus = self.batcher.drop_surplus(last_chance)
        self._report.surplus += self.dispatcher.drop_surplus(last_chance) + count(surplus, Stage.SURPLUS)
        self._left += surplus

    def _no_batch(self, step: int) -> PrlError:
        waiting = sorted({group.env.name for group in self.dispatcher.in_flight.values()})
        return PrlError(
            f"step {step}: {self.batcher.rollouts} rollouts after {self.config.batch_timeout_s:g} s (orchestrator."
            f"batch_timeout_s), still waiting for {self.dispatcher.rollouts_in_flight} of env {', '.join(waiting)}"
        )
