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

What becomes of a step is kept in two places: `NextStep` has the rollouts and the sums of the step that is being made,
`StepLines` the metrics lines of those that were shipped, until the monitors have them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from prl.base import checkpoint_folders
from prl.base.errors import NoSignal
from prl.config.orchestrator import OrchestratorConfig
from prl.config.schema import CheckpointConfig, ModelConfig
from prl.engines.client import PolicyPool
from prl.envs.isolation import task_group
from prl.monitors.base import Monitors
from prl.orchestrator.batcher import Batcher, decide
from prl.orchestrator.checkpoints import Checkpoints
from prl.orchestrator.collector import Collector
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.early_stopping import EarlyStopping
from prl.orchestrator.evaluate import Evaluator
from prl.orchestrator.intake import Intake
from prl.orchestrator.metrics import count, take_logged
from prl.orchestrator.next_step import NextStep
from prl.orchestrator.replay import Replay
from prl.orchestrator.shipper import Shipper
from prl.orchestrator.staleness import ENDED_EARLY, Staleness
from prl.orchestrator.state import RunState, load_components, save_components, saved_alone
from prl.orchestrator.step_lines import StepLines
from prl.orchestrator.types import Event, TrainEnv
from prl.orchestrator.weight_sync import WeightSync
from prl.rollouts.rollout import Stage
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
        state: That of the checkpoint that the run goes on from, its weights loaded; None = a new run.
        track: Records what the orchestrator does.
        **options: Fields of `OrchestratorConfig`.
    """

    Config: ClassVar = OrchestratorConfig
    ended_because: str | None = None
    """Reason why the run ended before `max_steps`; None if it did not."""

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
        config = OrchestratorConfig(**options)
        self.envs = envs
        self.monitors = monitors
        self.run_dir = run_dir
        self.track = track or Track(events.ORCHESTRATOR)
        self.goes_on = state is not None
        queue: asyncio.Queue[Event] = asyncio.Queue()
        # An env without weight is evaluated and never trained on.
        self.dispatcher = Dispatcher([env for env in envs if env.environment.config.weight > 0], queue)
        self.intake = Intake(envs, config.max_error_share)
        mixed_envs = self.dispatcher.envs if config.mix == "weights" else []
        self.batcher = batcher(config.batch_size, config.token_batch_size, mixed_envs)
        self.replay = Replay(envs, self.batcher, config.age_limit)
        self.staleness = Staleness(config, max_steps)
        self.shipper = Shipper(transport, seq_len, trainer_ranks, updates_per_batch)
        self.next_step = NextStep(run_dir)
        self.steps = StepLines(monitors, max_steps, half)
        self.checkpoints = Checkpoints(checkpoint or CheckpointConfig(), run_dir, envs)
        evaluations = self.track.beside(events.EVALUATION)
        stopping = EarlyStopping(config.stop)
        self.evaluator = Evaluator(envs, config.eval, stopping, transport, run_dir, model, evaluations)
        self.weight_sync = WeightSync(
            config, pool, transport, weights, queue, self.checkpoints, self.steps, self.evaluator, update_timeout_s
        )
        parts = (self.dispatcher, self.intake, self.batcher, self.staleness, self.steps, self.next_step)
        self.collector = Collector(config, *parts, self.weight_sync, self.track)
        if state is not None:
            self.load_state_dict(state)

    def state_dict(self) -> RunState:
        """Return what the run goes on with from here, after the batch of the step that was shipped last."""
        return RunState(
            step=self.steps.shipped,
            dispatcher=self.dispatcher.state_dict(),
            intake=self.intake.state_dict(),
            batcher=self.batcher.state_dict(),
            replay=self.replay.state_dict(),
            left=saved_alone(self.next_step.left),
            counted=saved_alone(self.next_step.counted),
            sums=dict(self.next_step.sums),
            components=save_components(self.envs),
        )

    def load_state_dict(self, state: RunState) -> None:
        """Go on from the checkpoint of an earlier part of the run, before anything has begun."""
        envs = {env.name: env for env in self.envs}
        load_components(self.envs, state.components)
        self.weight_sync.load_state_dict(state.sync, state.step)
        self.dispatcher.load_state_dict(state.dispatcher)
        self.batcher.load_state_dict(state.batcher, envs)
        self.replay.load_state_dict(state.replay, envs)
        self.next_step.load_state_dict(state, envs)
        # No other rollouts are kept: those of groups in flight are played again, and arrive then.
        waiting = [rollout for group in self.batcher.groups for rollout in group.rollouts]
        self.intake.load_state_dict(state.intake, waiting + self.next_step.left + self.next_step.counted)
        if state.step < self.steps.max_steps:  # the age limit may be lower than before
            self.collector.drop(self.staleness.left_behind(state.step))

    async def run(self) -> str | None:
        """Train until the last policy version is evaluated. Returns why that was before `max_steps`; None if not so."""
        async with contextlib.AsyncExitStack() as serving:
            for env in self.envs:
                # Before `setup`, which may connect one model and fail at the next.
                serving.push_async_callback(env.algorithm.close)
            await asyncio.gather(*(env.setup() for env in self.envs))
            for env in self.envs:
                await serving.enter_async_context(env.environment.serving())
            line: dict[str, float] = {}
            if not self.goes_on:  # else version 0 was evaluated by the part of the run that began it
                with self.track.doing(events.EVALUATED, 0):
                    line = {"step": 0} | await self.evaluator.evaluate_if_due(0, last=False)
            if line and self.evaluator.early_stopping.reason is None:
                self.monitors.step(line)
                line = {}
            async with self.dispatcher.running(), task_group() as loops:
                # Beside the loop: a checkpoint is complete once all of its files have been read, for their hashes.
                saving = loops.create_task(self.checkpoints.run())
                synced = loops.create_task(self.weight_sync.run())
                await self._make_batches()
                with self.track.doing(events.LAST_UPDATE, self.steps.shipped):
                    await synced
                saving.cancel()  # `finish` completes what the trainer writes from here on
            line |= synced.result()
            if self.ended_because is not None and (line or not self.goes_on):  # else it has the line of its last step
                arrived = self.intake.take()  # of a run without a step all that it has
                self.monitors.step(arrived | {"step": self.steps.shipped} | line)
        return self.ended_because

    def end(self) -> None:
        """Tell the trainer that no batch follows: it trains on what it has, writes a checkpoint and ends."""
        self.shipper.end(self.steps.shipped)
        self.weight_sync.weights.end()

    @property
    def unsaved(self) -> bool:
        """Return whether batches were shipped after that of the newest checkpoint.

        False while some ranks may have their part of a batch and others not: these could write no checkpoint together.
        """
        saved = checkpoint_folders.steps_of(self.run_dir)
        return self.steps.shipped > max(saved, default=0) and not self.shipper.sending

    def finish(self) -> None:
        """Complete the checkpoints that the trainer has written. To be called after the trainer has ended."""
        self.weight_sync.catch_up()
        self.checkpoints.finish()

    async def _make_batches(self) -> None:
        """Make one batch after the other, until the last one or until the run ends early."""
        while self.steps.shipped < self.steps.max_steps and self.ended_because is None:
            step = self.steps.shipped + 1
            for env in self.envs:
                env.algorithm.begin_step(step, self.steps.max_steps)
            with self._kept_if_it_fails(self.state_dict()):
                await self._make_batch(step)
        self.checkpoints.keep(self.state_dict())

    @contextlib.contextmanager
    def _kept_if_it_fails(self, before: RunState) -> Iterator[None]:
        """Give the checkpoints a state to go on from when the block, which makes a batch, fails or is cancelled.

        What raises an error may have done half of its work, and as the block is cancelled finished groups may be on
        their way to it: then the checkpoints get the state from `before` the batch, whose groups are played again.
        NoSignal is raised between two groups. The rollouts that no batch holds are recorded then.
        """
        try:
            yield
        except NoSignal:
            self.checkpoints.keep(self.state_dict())
            self.next_step.record_left(self.steps.shipped + 1)
            raise
        except asyncio.CancelledError:
            self.checkpoints.keep(self.state_dict() if self.dispatcher.events.empty() else before)
            raise
        except Exception:
            self.checkpoints.keep(before)
            raise

    async def _make_batch(self, step: int) -> None:
        """Collect, cut, filter, record, pack and ship the batch of `step`, unless the run ends before it."""
        # What is replayed has its place in the batch; new rollouts fill the rest.
        self.batcher.begin(self.replay.room(step))
        with self.track.doing(events.ROLLOUTS, step):  # unless the collector waits for something else
            self.next_step.add(await self.collector.collect(step))
        reason = self.evaluator.early_stopping.reason
        if reason is not None:
            self.collector.drop(ENDED_EARLY)
            return self._end_early(reason, self.monitors.status)  # the user has asked for it
        with self.track.doing(events.CUTTING, step):
            # A checkpoint of the step before has all groups that finished until now: none of them is played again.
            self.checkpoints.keep(self.state_dict())
            groups = self.batcher.cut(self.staleness.included(step))
            if not groups:
                tasks = ", ".join(f"{env.name}: {env.describe()}" for env in self.envs)
                return self._end_early(f"every env has run out of tasks ({tasks})", log.warning)
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            to_ship = decide(groups, self.shipper.seq_len)
            trained = count(to_ship, Stage.TRAINED)
            replayed = self.replay.take(step, groups) if trained else []  # a batch that makes no step uses up nothing
            if trained:
                self.collector.drop(self.staleness.left_behind(step))
        with self.track.doing(events.RECORDING, step):
            self.next_step.record(step, rollouts)
        with self.track.doing(events.PACKING, step):
            # Packed even if nothing trains: a stream of the wrong length is an error, whatever else is wrong.
            rows, truncated = self.shipper.pack(step, to_ship + replayed)
            self.batcher.check_batch(step, rollouts, self.run_dir)
        if trained:  # what trains nothing makes no step: its rollouts count with the next batch
            with self.track.doing(events.SHIPPING, step):
                # Curricula and components are asked, and may fail, while no rank has its part.
                line = self.next_step.take(step, self.envs, self.batcher.size_of, replayed)
                line |= take_logged(self.envs) | self.replay.metrics(replayed) | self.intake.take()
                self.shipper.send(step, rows, truncated, checkpoint=self.checkpoints.due(step))
                self.steps.ship(step, line)

    def _end_early(self, reason: str, say: Callable[[str], None]) -> None:
        """Make the last shipped step the last of the run."""
        self.ended_because = reason
        last_step = self.steps.shipped
        self.steps.end_at(last_step)
        self.shipper.end(last_step)
        say(f"the run ends after step {last_step} of {self.steps.max_steps}: {reason}")
        self.next_step.record_left(last_step)
