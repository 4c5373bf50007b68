"""Collect a batch: start groups as far ahead as may be, take in finished ones, and wait for what a step waits for."""

import asyncio
import time
from dataclasses import dataclass

from prl.config.orchestrator import OrchestratorConfig
from prl.curriculum.base import Context
from prl.orchestrator.batcher import MAX_EMPTY_BATCHES, Batcher
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.intake import Intake
from prl.orchestrator.metrics import count
from prl.orchestrator.next_step import NextStep
from prl.orchestrator.staleness import Dropped, Staleness
from prl.orchestrator.step_lines import StepLines
from prl.orchestrator.types import Event
from prl.orchestrator.weight_sync import WeightSync, no_policy
from prl.transport import events
from prl.transport.events import Track

PAUSE_S = 0.2
"""Seconds between two looks for a frozen model that is away."""


@dataclass
class Collector:
    """Moves groups from their start to the batcher, until a batch is complete.

    Starts groups as long as the steps that they are meant for need them. Stragglers count once they finish.
    """

    config: OrchestratorConfig
    dispatcher: Dispatcher
    intake: Intake
    batcher: Batcher
    staleness: Staleness
    steps: StepLines
    next_step: NextStep
    weight_sync: WeightSync
    track: Track

    async def collect(self, step: int) -> dict[str, float]:
        """Start groups and take in finished ones until the batch of `step` is complete, or the run is to end.

        A batch is complete if it is full and no group is in flight that it waits for: for its mix no longer than
        `batch_timeout_s`. The run is to end if no task is left to start, or early stopping says so.

        Returns:
            The metrics of where the time went, seconds.
        """
        started = time.monotonic()
        updates_before_s = self.weight_sync.updates_s
        idle_s = 0.0  # waiting for a policy or a frozen model, with nothing to play
        in_flight = self.dispatcher.in_flight
        awaited = self.staleness.awaited(step)
        while True:
            # All that has arrived, before anything is started: it decides what is missing.
            while not self.dispatcher.events.empty():
                self._handle(self.dispatcher.events.get_nowait())
            # The estimate of a token batch changes with each rollout that arrives.
            batch = self.batcher.batch_rollouts(self.dispatcher.largest_group)
            self.intake.check(step, MAX_EMPTY_BATCHES * batch, self.next_step.run_dir)
            rollout_s = time.monotonic() - started - idle_s
            # The deadline is that of the rollouts: engines that load weights or evaluate play none.
            left_s = self.config.batch_timeout_s + (self.weight_sync.updates_s - updates_before_s) - rollout_s
            full = self.batcher.full() and all(group.start_version > awaited for group in in_flight)
            if self._is_ending() or (full and (left_s <= 0 or not self.missing_envs(step))):
                return {"time/rollout": rollout_s, "time/wait_for_policy": idle_s}
            if not (self.weight_sync.busy or self.fill()):
                # Every env waits for a frozen model, which has a deadline of its own.
                with self.track.doing(events.OTHERS, step) as waiting:
                    await asyncio.sleep(PAUSE_S)
                idle_s += waiting.seconds
            elif in_flight and (self.rollouts_on_time or self.steps_ahead > 0):
                # A full batch waited for its mix alone, and goes without it at the deadline.
                if not await self._handle_next(left_s) and not full:
                    raise self.dispatcher.no_batch(step, self.batcher.rollouts, self.config.batch_timeout_s)
            else:
                # Only stragglers may come before the next policy version; each wait for one has the whole deadline.
                with self.track.doing(events.POLICY, step) as waiting:
                    came = await self._handle_next(self.config.policy_timeout_s)
                if not came:
                    raise no_policy(step, self.weight_sync.pool.version, self.config.policy_timeout_s)
                idle_s += waiting.seconds

    def _is_ending(self) -> bool:
        """Return whether no further batch is to be made: by early stopping, or because every task has been played."""
        if self.weight_sync.evaluator.early_stopping.reason is not None:
            return True
        return not self.dispatcher.in_flight and all(env.ended for env in self.dispatcher.envs)

    async def _handle_next(self, timeout_s: float) -> bool:
        """Handle the next event. Returns whether one came in time; an update or an evaluation has all its time."""
        try:
            async with asyncio.timeout(timeout_s):
                event = await self.dispatcher.events.get()
        except TimeoutError:
            if not self.weight_sync.busy:
                return False
            # An update ends with an event, and has a deadline of its own.
            event = await self.dispatcher.events.get()
        self._handle(event)
        return True

    def _handle(self, event: Event) -> None:
        if event is not None and not (self.intake.admit(event) and self.batcher.add(event)):
            self.next_step.leave(event.rollouts)  # it does not wait for a batch

    def drop(self, what: Dropped) -> None:
        """Drop waiting groups, and groups in flight; the next metrics line counts their rollouts and tokens."""
        waiting = self.batcher.drop(what.last_chance, what.stage, what.reason)
        lost = [rollout for rollout in waiting if rollout.stage is what.stage]
        lost += self.dispatcher.arrived(what.last_chance)
        tokens = float(sum(rollout.num_completion_tokens for rollout in lost))
        rollouts = float(self.dispatcher.drop(what.last_chance) + count(waiting, what.stage))
        self.next_step.add({what.metric: rollouts, f"{what.metric}_tokens": tokens})
        self.next_step.leave(waiting)

    def fill(self) -> bool:
        """Start what is missing. Returns False if no group is in flight and none can start."""
        steps = self.steps_ahead
        batch = self.batcher.batch_rollouts(self.dispatcher.largest_group)
        latest = self.weight_sync.evaluator.latest
        context = Context(self.steps.shipped + 1, self.weight_sync.pool.version, latest.metrics)
        on_time = self.rollouts_on_time  # looked up once: a step may be thousands of groups
        while True:
            under_way = on_time + self.batcher.rollouts
            # With nothing to come and no full batch, a token batch was estimated too small: one more group.
            going_on = on_time or self.batcher.full() or steps <= 0
            if under_way >= self.config.oversampling_factor * steps * batch and going_on:
                return True
            started = self.dispatcher.start_group(context)
            if not started:
                return bool(self.dispatcher.in_flight)
            on_time += started

    def missing_envs(self, step: int) -> set[str]:
        """Return the envs of which the full batch of `step` waits for more, stragglers and absent models left out.

        Groups that may start now, and are not for this batch alone, are started first: it may wait for them, too.
        """
        if self.steps_ahead > 1 and not self.weight_sync.busy:
            self.fill()
        on_time = self.staleness.on_time(step - 1)
        in_flight = {group.env.name for group in self.dispatcher.in_flight if group.start_version >= on_time}
        coming = {env.name for env in self.dispatcher.envs if env.name in in_flight and env.up}
        return self.batcher.waits_for(coming, self.staleness.included(step))

    @property
    def rollouts_on_time(self) -> int:
        """Rollouts in flight that are meant for a step not shipped yet: all but those of stragglers."""
        return self.dispatcher.rollouts_since(self.staleness.on_time(self.steps.shipped))

    @property
    def steps_ahead(self) -> int:
        """Steps that a rollout which starts now is meant for, less those shipped."""
        return self.staleness.steps_ahead(self.weight_sync.pool.version, self.steps.shipped)
