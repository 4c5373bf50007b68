"""The orchestrator: tasks become rollouts, rollouts become batches, and new weights come back.

The road of a group, with the stage that moves it on below each arrow:

    task ------> IN FLIGHT ---------> FINISHED ------------> WAITING ------> IN BATCH ------------------> SHIPPED
        Dispatcher   |    play, grade,    |   Intake.admit,     |    Batcher     |    post_batch filters,
        .start_group |    score, credit   |   pre_batch filters,|    .cut        |    records, pack, send
                     |                    |   Batcher.add       |                |
                     +-> CANCELLED        +-> DROPPED           +-> DROPPED      +-> not shipped, if nothing of the
                     |   stale, surplus       failed, empty,        stale,           batch trains
                     |                        difficulty,           surplus
                     +-> an exception         pre_filtered
                         ends the run

A group is whole on this road. Its rollouts leave one by one, each with one outcome (`prl.rollouts.rollout`), and are
recorded with the step at which the group ended. `prl.orchestrator.staleness` says what a batch waits for, and what is
too old for it.

Three kinds of asyncio tasks run side by side: one for each group in flight, `WeightSync.run`, and
`Orchestrator._make_batches`, the one loop that moves groups on. The first two speak to the loop through one queue of
events (`prl.orchestrator.types`). An exception in any of them ends all.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from prl.config.schema import CheckpointConfig, ModelConfig
from prl.errors import PrlError
from prl.inference.client import PolicyPool
from prl.monitors.base import Monitors
from prl.orchestrator.batcher import MAX_EMPTY_BATCHES, Batcher, decide
from prl.orchestrator.checkpoints import Checkpoints
from prl.orchestrator.config import OrchestratorConfig
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.intake import Intake
from prl.orchestrator.metrics import count, of_step
from prl.orchestrator.pace import Pace
from prl.orchestrator.packing import pack
from prl.orchestrator.snapshot import held, held_at_the_end, restore
from prl.orchestrator.staleness import ENDED_EARLY, NONE_DROPPED, Dropped, Staleness
from prl.orchestrator.state import RunState
from prl.orchestrator.types import Event, Group, TrainEnv, task_group
from prl.orchestrator.weight_sync import WeightSync, no_policy
from prl.rollouts.records import write_records
from prl.rollouts.rollout import Rollout, Stage
from prl.wire import events
from prl.wire.messages import MicroBatch, StepBatch
from prl.wire.transport import Transport

log = logging.getLogger(__name__)

PAUSE_S = 0.2


class Orchestrator:
    """Runs `max_steps` steps, or fewer if every env runs out of tasks. Step n turns policy version n-1 into version n.

    Invariants: batches are shipped in the order of their steps; the batch of step n holds no rollout that started from
    a version below n-1-`age_limit`; no rollout starts that is meant for a step after version+1+`max_async_level`; every
    rollout that arrives before the last batch is shipped is recorded once, with one outcome; stragglers aside, `fill`
    starts no group while `oversampling_factor` times the rollouts are under way that the steps take for which a
    rollout that starts now is meant, except for one that is started because a token batch was estimated too small.

    Args:
        envs: The envs of the run.
        pool: The live policy's engines.
        transport: The way to the trainer and back.
        monitors: Take one metrics line per step.
        run_dir: Where rollouts and checkpoints are written.
        model: The policy before step 1.
        max_steps: Steps of the run.
        seq_len: Tokens in a packed row.
        trainer_ranks: Ranks that a batch is split over.
        update_timeout_s: Deadline for an engine to load weights, seconds.
        checkpoint: When checkpoints are written, and which are kept.
        state: Of the checkpoint that the run goes on from, its weights loaded; None = a new run.
        **knobs: Fields of `OrchestratorConfig`.
    """

    Config: ClassVar = OrchestratorConfig
    """Its knobs."""
    ended_because: str | None = None
    """Why the run ended before `max_steps`; None if it did not."""
    counted: list[Rollout]
    """Those of the next metrics line: of the batches that were cut, shipped or not, and those that filters dropped
    before. A rollout counts in one line."""
    left: list[Rollout]
    """Rollouts of groups that no batch holds; recorded with the next batch."""
    sums: Counter[str]
    """Seconds and dropped rollouts by metric, for the next line."""

    def __init__(
        self,
        *,
        envs: list[TrainEnv],
        pool: PolicyPool,
        transport: Transport,
        monitors: Monitors,
        run_dir: Path,
        model: ModelConfig,
        max_steps: int,
        seq_len: int,
        trainer_ranks: int,
        update_timeout_s: float,
        checkpoint: CheckpointConfig | None = None,
        state: RunState | None = None,
        **knobs: Any,
    ):
        self.config = config = OrchestratorConfig(**knobs)
        self.envs, self.pool = envs, pool
        self.transport, self.monitors = transport, monitors
        self.run_dir, self.max_steps = run_dir, max_steps
        self.seq_len, self.trainer_ranks = seq_len, trainer_ranks
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.dispatcher = Dispatcher(envs, self.events)
        self.intake = Intake(envs, config.max_error_share)
        mixed = envs if config.mix == "weights" else []
        self.batcher = Batcher(config.batch_size, config.token_batch_size, mixed)
        self.staleness = Staleness(config, max_steps)
        self.checkpoints = Checkpoints(checkpoint or CheckpointConfig(), run_dir, envs)
        self.weight_sync = WeightSync(
            config,
            pool,
            transport,
            monitors,
            envs,
            self.events,
            checkpoints=self.checkpoints,
            run_dir=run_dir,
            model=model,
            max_steps=max_steps,
            update_timeout_s=update_timeout_s,
            state=state,
        )
        self.pace = Pace(self.dispatcher, self.batcher, self.weight_sync, self.staleness, config.oversampling_factor)
        self.counted, self.left, self.sums = [], [], Counter()
        self.lane, self.goes_on = events.Lane(events.ORCHESTRATOR), state is not None
        if state is not None:
            restore(self, state)

    async def run(self) -> str | None:
        """Train until the last policy version is evaluated. Returns why that was before `max_steps`; None if not so."""
        async with contextlib.AsyncExitStack() as serving:
            for env in self.envs:
                serving.push_async_callback(env.algorithm.close)
            await asyncio.gather(*(env.setup() for env in self.envs))
            for env in self.envs:
                await serving.enter_async_context(env.environment.serving())
            line: dict[str, float] = {}
            if not self.goes_on:
                line = {"step": 0} | await self.weight_sync.evaluate_if_due(0, since=0, last=False)
            if line and self.weight_sync.early_stopping.reason is None:
                self.monitors.step(line)
                line = {}
            async with self.dispatcher.running(), task_group() as loops:
                saving = loops.create_task(self.checkpoints.run())
                synced = loops.create_task(self.weight_sync.run())
                with held_at_the_end(self):
                    await self._make_batches()
                self.lane.enter(events.LAST_UPDATE, self.weight_sync.shipped)
                await synced
                saving.cancel()
            if self.ended_because is not None:  # what arrived after the last batch counts in the last line
                line |= synced.result()
                late = self.intake.take(again="step" in line)
                self.monitors.step({"step": self.weight_sync.shipped} | line | late)
        return self.ended_because

    def end(self) -> None:
        """Tell the trainer that no batch follows: it trains on what it has, writes a checkpoint and ends."""
        self.weight_sync.end()

    def finish(self) -> None:
        """Complete the checkpoints that the trainer has written. To be called after the trainer has ended."""
        self.weight_sync.catch_up()
        self.checkpoints.finish()

    async def _make_batches(self) -> None:
        """Collect, cut, filter, record, pack and ship one batch after the other."""
        while self.weight_sync.shipped < self.max_steps:
            step = self.weight_sync.shipped + 1
            self.sums.update(await self._collect(step))
            if (reason := self.weight_sync.early_stopping.reason) is not None:
                self.drop(ENDED_EARLY)
                return self._end_early(reason, self.monitors.status)  # the user has asked for it
            self.lane.enter(events.CUTTING, step)
            self.checkpoints.hold(held(self))
            groups = self.batcher.cut(self.staleness.included(step))
            if not groups:
                tasks = ", ".join(f"{env.name}: {env.describe()}" for env in self.envs)
                return self._end_early(f"every env has run out of tasks ({tasks})", log.warning)
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            to_ship = decide(groups, self.seq_len)
            trained = count(to_ship, Stage.TRAINED)
            if trained:
                self.drop(self.staleness.left_behind(step))
            self.lane.enter(events.RECORDING, step)
            write_records(self.run_dir, step, rollouts + self.left)
            self.counted += rollouts + [rollout for rollout in self.left if rollout.stage is Stage.PRE_FILTERED]
            self.left.clear()
            self.lane.enter(events.PACKING, step)
            try:
                samples = [sample for rollout in to_ship for sample in rollout.samples]
                rows, truncated = pack(samples, self.seq_len, self.trainer_ranks)
            except ValueError as error:  # samples hold what the user's algorithm wrote
                raise PrlError(f"step {step}: {error}") from error
            self.batcher.check_batch(step, rollouts)
            self.lane.enter(events.SHIPPING, step)
            if trained:
                self._ship(step, rows, truncated)

    async def _collect(self, step: int) -> dict[str, float]:
        """Start groups and take in finished ones until the batch of `step` is complete, or the run is to end.

        A batch is complete if it is full and no group is in flight that it waits for: for its mix no longer than
        `batch_timeout_s`. The run is to end if no task is left to start, or early stopping says so.

        Returns:
            Where the time went, seconds.
        """
        started, updates_s, idle_s = time.monotonic(), self.weight_sync.updates_s, 0.0
        in_flight, awaited = self.dispatcher.in_flight, self.staleness.awaited(step)
        while True:
            while not self.events.empty():
                self._handle(self.events.get_nowait())
            limit = MAX_EMPTY_BATCHES * self.batcher.batch_rollouts(self.dispatcher.largest_group)
            self.intake.check(step, limit)
            before = time.monotonic()
            # The deadline of a batch leaves out what is not the rollouts' time.
            left_s = self.config.batch_timeout_s - (before - started - idle_s) + self.weight_sync.updates_s - updates_s
            full = self.batcher.full() and all(group.start_version > awaited for group in in_flight)
            ending = self.weight_sync.early_stopping.reason is not None
            ending |= not in_flight and all(env.ended for env in self.envs)
            if ending or (full and (left_s <= 0 or not self.pace.missing_envs(step))):
                return {"time/rollout": before - started - idle_s, "time/wait_for_policy": idle_s}
            if not (self.weight_sync.busy or self.pace.fill()):
                # Every env waits for a frozen model, which has a deadline of its own.
                self.lane.enter(events.OTHERS, step)
                await asyncio.sleep(PAUSE_S)
                idle_s += time.monotonic() - before
            elif in_flight and (self.pace.rollouts_on_time or self.pace.steps_ahead > 0):
                self.lane.enter(events.ROLLOUTS, step)
                if not await self._wait(left_s) and not full:
                    raise self.dispatcher.no_batch(step, self.batcher.rollouts, self.config.batch_timeout_s)
            else:  # only stragglers may come before the next policy version; each wait for one has the whole deadline
                self.lane.enter(events.POLICY, step)
                if not await self._wait(self.config.policy_timeout_s):
                    raise no_policy(step, self.pool.version, self.config.policy_timeout_s)
                idle_s += time.monotonic() - before

    async def _wait(self, timeout_s: float) -> bool:
        """Handle the next event. Returns whether one came in time; an update or an evaluation has all its time."""
        try:
            async with asyncio.timeout(timeout_s):
                event = await self.events.get()
        except TimeoutError:
            if not self.weight_sync.busy:
                return False
            event = await self.events.get()
        self._handle(event)
        return True

    def _handle(self, event: Event) -> None:
        if isinstance(event, Group) and not (self.intake.admit(event) and self.batcher.add(event)):
            self.left += event.rollouts  # it does not wait for a batch

    def drop(self, what: Dropped) -> None:
        waiting = self.batcher.drop(what.last_chance, what.stage, what.reason)
        lost = [r for r in waiting if r.stage is what.stage] + self.dispatcher.arrived(what.last_chance)
        tokens = float(sum(rollout.num_completion_tokens for rollout in lost))
        rollouts = float(self.dispatcher.drop(what.last_chance) + count(waiting, what.stage))
        self.sums.update({what.metric: rollouts, f"{what.metric}_tokens": tokens})
        self.left += waiting

    def _ship(self, step: int, rows: list[list[MicroBatch]], truncated: int) -> None:
        checkpoint = self.checkpoints.due(step)
        for rank, micro_batches in enumerate(rows):
            self.transport.send_batch(StepBatch(step, micro_batches, truncated, checkpoint), rank)
        line = of_step(self.counted, step, self.envs, self.batcher.size_of)
        self.weight_sync.expect(step, line | NONE_DROPPED | self.sums | self.intake.take())
        self.counted.clear()
        self.sums.clear()
        if truncated:
            log.warning("step %d: %d samples cut to trainer.seq_len=%d tokens", step, truncated, self.seq_len)

    def _end_early(self, reason: str, say: Callable[[str], None]) -> None:
        """Make the last shipped step the last of the run."""
        self.ended_because = reason
        last_step = self.weight_sync.last_step = self.weight_sync.shipped
        self.transport.send_end(last_step)
        say(f"the run ends after step {last_step} of {self.max_steps}: {reason}")
        if self.left:
            write_records(self.run_dir, last_step, self.left)
            self.left.clear()
