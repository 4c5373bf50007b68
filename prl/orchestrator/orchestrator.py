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

A group is whole on this road; where its algorithm does not wait for groups, each rollout goes as a group of its own,
with the same id, from FINISHED on. Its rollouts leave one by one, each with one outcome (`prl.rollouts.rollout`), and
are recorded with the step at which the group ended. `prl.orchestrator.staleness` says what a batch waits for, and what
is too old for it.

Three kinds of asyncio tasks run side by side: one for each group in flight, `WeightSync.run`, and
`Orchestrator._make_batches`, the one loop that moves groups on. The first two speak to the loop through one queue of
events (`prl.orchestrator.types`). An exception in any of them ends all.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from prl.base import checkpoint_folders
from prl.base.errors import NoSignal, PrlError
from prl.config.orchestrator import OrchestratorConfig
from prl.config.schema import CheckpointConfig, ModelConfig
from prl.engines.client import PolicyPool
from prl.envs.isolation import task_group
from prl.monitors.base import Monitors
from prl.orchestrator.batcher import Batcher, decide
from prl.orchestrator.checkpoints import Checkpoints
from prl.orchestrator.collector import Collector
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.intake import Intake
from prl.orchestrator.metrics import count, metrics_of_step, take_logged
from prl.orchestrator.replay import Replay
from prl.orchestrator.staleness import ENDED_EARLY, NONE_DROPPED, Dropped, Staleness
from prl.orchestrator.state import RunState, load_components, restored, save_components, saved_alone
from prl.orchestrator.types import Event, TrainEnv
from prl.orchestrator.weight_sync import WeightSync
from prl.rollouts.messages import MicroBatch, StepBatch
from prl.rollouts.packing import pack
from prl.rollouts.records import write_records
from prl.rollouts.rollout import Rollout, Stage
from prl.transport import events
from prl.transport.events import Track
from prl.transport.files import FileTransport
from prl.weights.base import Weights

log = logging.getLogger(__name__)


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
        weights: The way of policy versions to the engines.
        monitors: Take one metrics line per step.
        run_dir: Where rollouts and checkpoints are written.
        model: The policy before step 1.
        max_steps: Steps of the run.
        seq_len: Tokens in a packed row.
        trainer_ranks: Ranks that a batch is split over.
        updates_per_batch: Optimiser steps that a batch is cut into.
        update_timeout_s: Deadline for an engine to load weights, seconds.
        half: Engine or trainer computes in 16 bits.
        checkpoint: When checkpoints are written, and which are kept.
        batcher: Makes the batcher of `orchestrator.batcher`.
        state: Of the checkpoint that the run goes on from, its weights loaded; None = a new run.
        track: Records what the orchestrator does.
        **options: Fields of `OrchestratorConfig`.
    """

    Config: ClassVar = OrchestratorConfig
    ended_because: str | None = None
    """Why the run ended before `max_steps`; None if it did not."""
    goes_on: bool = False
    counted: list[Rollout]  # of the next metrics line: those of batches that were cut, and those that filters dropped
    sums: Counter[str]  # seconds and dropped rollouts by metric, for the next line
    before_batch: RunState  # what the run goes on with from before the batch that is being made
    shipping: bool = False
    """Whether ranks may have their parts of a batch, and its step is not the last that was shipped."""

    def __init__(
        self,
        *,
        envs: list[TrainEnv],
        pool: PolicyPool,
        transport: FileTransport,
        weights: Weights,
        monitors: Monitors,
        run_dir: Path,
        model: ModelConfig,
        max_steps: int,
        seq_len: int,
        trainer_ranks: int,
        updates_per_batch: int = 1,
        update_timeout_s: float,
        half: bool = True,
        batcher: Callable[..., Batcher] = Batcher,
        checkpoint: CheckpointConfig | None = None,
        state: RunState | None = None,
        track: Track | None = None,
        **options: Any,
    ):
        self.config = config = OrchestratorConfig(**options)
        self.track = track or Track(events.ORCHESTRATOR)
        self.envs, self.pool, self.transport, self.monitors = envs, pool, transport, monitors
        self.run_dir, self.max_steps = run_dir, max_steps
        self.seq_len, self.trainer_ranks, self.updates_per_batch = seq_len, trainer_ranks, updates_per_batch
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.dispatcher = Dispatcher([env for env in envs if env.environment.config.weight > 0], self.events)
        self.intake = Intake(envs, config.max_error_share)
        self.batcher = batcher(config.batch_size, config.token_batch_size, self.mixed_envs)
        self.replay = Replay(envs, self.batcher, config.age_limit)
        self.staleness = Staleness(config, max_steps)
        self.checkpoints = Checkpoints(checkpoint or CheckpointConfig(), run_dir, envs)
        shared = (config, pool, transport, weights, monitors, envs, self.events)
        self.weight_sync = WeightSync(
            *shared,
            checkpoints=self.checkpoints,
            run_dir=run_dir,
            model=model,
            max_steps=max_steps,
            update_timeout_s=update_timeout_s,
            half=half,
            track=self.track.beside(events.EVALUATION),
        )
        parts = (self.dispatcher, self.intake, self.batcher, self.weight_sync, self.staleness)
        self.collector = Collector(config, self.events, *parts, self.track)
        self.counted, self.sums, self.before_batch = [], Counter(), state or RunState(0)
        if state is not None:
            self.load_state_dict(state)

    def state_dict(self) -> RunState:
        """Return what the run goes on with from here, after the batch of the step that was shipped last."""
        return RunState(
            step=self.weight_sync.shipped,
            dispatcher=self.dispatcher.state_dict(),
            intake=self.intake.state_dict(),
            batcher=self.batcher.state_dict(),
            replay=self.replay.state_dict(),
            left=saved_alone(self.collector.left),
            counted=saved_alone(self.counted),
            sums=dict(self.sums),
            components=save_components(self.envs),
        )

    def load_state_dict(self, state: RunState) -> None:
        """Go on from the checkpoint of an earlier part of the run, before anything has begun."""
        self.goes_on = True
        envs = {env.name: env for env in self.envs}
        load_components(self.envs, state.components)
        self.weight_sync.load_state_dict(state.sync, state.step)
        self.dispatcher.load_state_dict(state.dispatcher)
        self.batcher.load_state_dict(state.batcher, envs)
        self.replay.groups = [restored(saved, envs[saved.env]) for saved in state.replay]
        for saved, rollouts in ((state.left, self.collector.left), (state.counted, self.counted)):
            for group in saved:
                rollouts += restored(group, envs[group.env]).rollouts
        waiting = [rollout for group in self.batcher.groups for rollout in group.rollouts]
        self.intake.load_state_dict(state.intake, waiting + self.collector.left + self.counted)
        self.sums.update(state.sums)
        if self.counted:
            write_records(self.run_dir, state.step + 1, self.counted)
        if state.step < self.max_steps:  # the age limit may be lower than before
            self.drop(self.staleness.left_behind(state.step))

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
                with self.track.doing(events.EVALUATED, 0):
                    line = {"step": 0} | await self.weight_sync.evaluate_if_due(0, since=0, last=False)
            if line and self.weight_sync.early_stopping.reason is None:
                self.monitors.step(line)
                line = {}
            async with self.dispatcher.running(), task_group() as loops:
                saving = loops.create_task(self.checkpoints.run())
                synced = loops.create_task(self.weight_sync.run())
                with self._kept_at_the_end():
                    await self._make_batches()
                with self.track.doing(events.LAST_UPDATE, self.weight_sync.shipped):
                    await synced
                saving.cancel()
            line |= synced.result()
            if self.ended_because is not None and (line or not self.goes_on):  # else it has the line of its last step
                arrived = self.intake.take()  # of a run without a step all that it has
                self.monitors.step(arrived | {"step": self.weight_sync.shipped} | line)
        return self.ended_because

    def end(self) -> None:
        """Tell the trainer that no batch follows: it trains on what it has, writes a checkpoint and ends."""
        self.weight_sync.end()

    @property
    def unsaved(self) -> bool:
        """Return whether batches were shipped after that of the newest checkpoint; not while ranks may have parts of
        one."""
        saved = checkpoint_folders.steps_of(self.run_dir)
        return self.weight_sync.shipped > max(saved, default=0) and not self.shipping

    def finish(self) -> None:
        """Complete the checkpoints that the trainer has written. To be called after the trainer has ended."""
        self.weight_sync.catch_up()
        self.checkpoints.finish()

    @contextlib.contextmanager
    def _kept_at_the_end(self) -> Iterator[None]:
        """Give the checkpoints the state when the block has ended or is cancelled, with the groups then in flight.

        Also when it raises NoSignal: then the rollouts that no batch holds are recorded, too. What raises another error
        may have done half of its work, and as the block is cancelled finished groups may be on their way to it: then
        the checkpoints get the state from before the batch that was being made, whose groups are played again.
        """
        try:
            yield
        except NoSignal:
            self.checkpoints.keep(self.state_dict())
            write_records(self.run_dir, self.weight_sync.shipped + 1, self.collector.left)
            raise
        except asyncio.CancelledError:
            self.checkpoints.keep(self.state_dict() if self.events.empty() else self.before_batch)
            raise
        except Exception:
            self.checkpoints.keep(self.before_batch)
            raise
        self.checkpoints.keep(self.state_dict())

    @property
    def mixed_envs(self) -> list[TrainEnv]:
        """The envs that a batch mixes by weight; none where it takes what comes first."""
        return self.dispatcher.envs if self.config.mix == "weights" else []

    async def _make_batches(self) -> None:
        """Collect, cut, filter, record, pack and ship one batch after the other."""
        while self.weight_sync.shipped < self.max_steps:
            step = self.weight_sync.shipped + 1
            for env in self.envs:
                env.algorithm.step, env.algorithm.max_steps = step, self.max_steps
            self.before_batch = self.state_dict()
            self.batcher.begin(self.replay.room(step))
            self.sums.update(await self.collector.collect(step))
            if (reason := self.weight_sync.early_stopping.reason) is not None:
                self.drop(ENDED_EARLY)
                return self._end_early(reason, self.monitors.status)  # the user has asked for it
            with self.track.doing(events.CUTTING, step):
                self.checkpoints.keep(self.state_dict())
                groups = self.batcher.cut(self.staleness.included(step))
                if not groups:
                    tasks = ", ".join(f"{env.name}: {env.describe()}" for env in self.envs)
                    return self._end_early(f"every env has run out of tasks ({tasks})", log.warning)
                rollouts = [rollout for group in groups for rollout in group.rollouts]
                to_ship = decide(groups, self.seq_len)
                trained = count(to_ship, Stage.TRAINED)
                replayed = self.replay.take(step, groups) if trained else []
                if trained:
                    self.drop(self.staleness.left_behind(step))
            with self.track.doing(events.RECORDING, step):
                self._record(step, rollouts)
            with self.track.doing(events.PACKING, step):
                rows, truncated = self._pack(step, to_ship + replayed)
                self.batcher.check_batch(step, rollouts)
            if trained:  # what trains nothing makes no step: its rollouts count with the next batch
                with self.track.doing(events.SHIPPING, step):
                    self._ship(step, rows, truncated, replayed)

    def _record(self, step: int, rollouts: list[Rollout]) -> None:
        """Write what became of the rollouts of a cut batch, and of those that left before."""
        left = self.collector.left
        write_records(self.run_dir, step, rollouts + left)
        self.counted += rollouts + [rollout for rollout in left if rollout.stage is Stage.PRE_FILTERED]
        left.clear()

    def _pack(self, step: int, rollouts: list[Rollout]) -> tuple[list[list[MicroBatch]], int]:
        """The rows of each rank, and the number of samples that were cut to fit."""
        samples = [sample for rollout in rollouts for sample in rollout.samples]
        try:
            return pack(samples, self.seq_len, self.trainer_ranks, self.updates_per_batch)
        except ValueError as error:  # samples hold what the user's algorithm wrote
            raise PrlError(f"step {step}: {error}") from error

    def drop(self, what: Dropped) -> None:
        waiting = self.batcher.drop(what.last_chance, what.stage, what.reason)
        lost = [r for r in waiting if r.stage is what.stage] + self.dispatcher.arrived(what.last_chance)
        tokens = float(sum(rollout.num_completion_tokens for rollout in lost))
        rollouts = float(self.dispatcher.drop(what.last_chance) + count(waiting, what.stage))
        self.sums.update({what.metric: rollouts, f"{what.metric}_tokens": tokens})
        self.collector.left += waiting

    def _ship(self, step: int, rows: list[list[MicroBatch]], truncated: int, replayed: list[Rollout]) -> None:
        arrived = self.intake.take()  # asks curricula, which may fail: while no rank has its part
        checkpoint = self.checkpoints.due(step)
        self.shipping = True
        for rank, micro_batches in enumerate(rows):
            self.transport.send_batch(StepBatch(step, micro_batches, truncated, checkpoint), rank)
        line = metrics_of_step(self.counted, step, self.envs, self.batcher.size_of, replayed)
        line |= take_logged(self.envs) | self.replay.metrics(replayed)
        self.weight_sync.expect(step, line | NONE_DROPPED | self.sums | arrived)
        self.shipping = False
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
        if self.collector.left:
            write_records(self.run_dir, last_step, self.collector.left)
            self.collector.left.clear()
