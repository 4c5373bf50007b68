"""The orchestrator: tasks become rollouts, rollouts become batches, and new weights come back."""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from pathlib import Path

from prl.errors import PrlError
from prl.inference.client import InferencePool
from prl.monitors.monitor import Monitor
from prl.orchestrator import metrics as measure
from prl.orchestrator.batcher import Batcher
from prl.orchestrator.checkpoints import Checkpoints
from prl.orchestrator.config import OrchestratorConfig
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.error_budget import ErrorBudget
from prl.orchestrator.filters import Filters
from prl.orchestrator.intake import Intake
from prl.orchestrator.packing import pack
from prl.orchestrator.types import Group, TrainEnv
from prl.orchestrator.weight_sync import Progress, WeightSync, no_policy
from prl.rollouts.records import write_records
from prl.rollouts.rollout import Rollout
from prl.wire import MicroBatch, StepBatch, files

log = logging.getLogger(__name__)

PAUSE_S = 0.2
MAX_EMPTY_BATCHES = 10


class Orchestrator:
    """Runs `max_steps` steps, or fewer if every env runs out of tasks. Step n turns policy version n-1 into version n.

    Two loops share one event loop: `_produce` collects and ships batches, `WeightSync` loads each new policy version into
    the engines. How far the first may run ahead of the second is `max_async_level`.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        envs: list[TrainEnv],
        pool: InferencePool,
        filters: Filters,
        monitor: Monitor,
        *,
        run_dir: Path,
        max_steps: int,
        seq_len: int,
        trainer_ranks: int,
        update_timeout_s: float,
        oversampling: float = 1.0,
    ):
        self.config = config
        self.envs = envs
        self.pool = pool
        self.filters = filters
        self.monitor = monitor
        self.run_dir = run_dir
        self.progress = Progress(max_steps, last_step=max_steps)
        self.ended_because: str | None = None
        """Why the run ends before `max_steps`; None while it does not."""
        self.seq_len = seq_len
        self.trainer_ranks = trainer_ranks
        self.oversampling = oversampling
        self.sink = Batcher(config.batch_size, config.token_batch_size)
        self.failures = ErrorBudget([env.name for env in envs], config.max_error_share)
        self.arrivals = Intake(envs)
        self.checkpoints = Checkpoints(run_dir, envs)
        self.dispatcher = Dispatcher(envs, self._on_end)
        self.follower = WeightSync(
            config,
            envs,
            pool,
            monitor,
            self.checkpoints,
            self.progress,
            self._drop_stale,
            run_dir=run_dir,
            update_timeout_s=update_timeout_s,
        )
        self._surplus = 0

    @property
    def last_step(self) -> int:
        return self.progress.last_step

    async def run(self) -> None:
        """Train. Returns when the last policy version is loaded and evaluated."""
        async with contextlib.AsyncExitStack() as serving:
            for env in self.envs:
                serving.push_async_callback(env.close)
            await asyncio.gather(*(env.setup() for env in self.envs))
            for env in self.envs:
                await serving.enter_async_context(env.environment.serving())
            try:
                self.monitor.step({"step": 0} | await self.follower.evaluate(0, since=0))
                async with asyncio.TaskGroup() as loops:
                    loops.create_task(self._produce())
                    followed = loops.create_task(self.follower.run())
                if self.ended_because is not None:  # a line more, of what has arrived since the last batch
                    self.monitor.step(
                        {"step": self.last_step} | self.failures.take() | self.arrivals.take() | followed.result()
                    )
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
            finally:
                await self.dispatcher.close()

    async def _produce(self) -> None:
        empty = 0
        # Of the batches that had nothing to train as well: they are told of with the next one.
        counted: list[Rollout] = []
        times: Counter[str] = Counter()
        while self.progress.shipped < self.progress.max_steps:
            step = self.progress.shipped + 1
            times.update(await self._collect(step))
            groups = self.sink.cut(-math.inf if self.oversampling > 1 else self._last_chance(step))
            if not groups:
                return self._end_early()
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            self.filters.post_batch.apply(rollouts)
            left = [rollout for rollout in rollouts if rollout.in_batch and not rollout.dropped]
            kept = [rollout for rollout in left if measure.trains(rollout, self.seq_len)]
            if kept and self.oversampling > 1:
                self._drop_surplus(step)
            write_records(self.run_dir, step, rollouts, kept, self.sink.discarded)
            counted += rollouts + [rollout for rollout in self.sink.discarded if rollout.dropped]
            self.sink.discarded = []
            packed = self._packed(step, left)
            if not kept:
                empty += 1
                self._warn_empty(step, empty, rollouts)
                continue
            self._warn_few(step, rollouts, kept)
            line = measure.of_batch(counted, kept, step) | measure.of_filters(counted, self.filters)
            line |= (
                times
                | self.failures.take()
                | self.arrivals.take()
                | {"off_policy/dropped": float(self.progress.dropped)}
            )
            if self.oversampling > 1:
                line["rollouts/surplus"] = float(self._surplus)
            self.progress.dropped = self._surplus = 0
            await self._ship(step, *packed, line)
            empty, counted, times = 0, [], Counter()

    async def _collect(self, step: int) -> dict[str, float]:
        """Keep the engines busy until the batch of `step` is complete, or nothing is left that could add to it.

        Returns where the time went, seconds.
        """
        started, updates_s = time.monotonic(), self.progress.updates_s
        idle = 0.0
        while not (self._complete(step) or self._out_of_tasks()):
            if not self._fill():  # every env waits for a frozen model, and that wait has a deadline of its own
                before = time.monotonic()
                await asyncio.sleep(PAUSE_S)
                idle += time.monotonic() - before
                continue
            waiting_for_policy = not self.dispatcher.in_flight
            timeout_s = self.config.policy_timeout_s if waiting_for_policy else self.config.batch_timeout_s
            before = time.monotonic()
            try:
                # The time that rollouts took is not the trainer's: each wait for a policy has its own deadline.
                spent = 0.0 if waiting_for_policy else before - started - idle - (self.progress.updates_s - updates_s)
                async with asyncio.timeout(timeout_s - spent):
                    await self.progress.changed.wait()
            except TimeoutError:
                if self.progress.updating:  # an update and an evaluation have deadlines of their own
                    await self.progress.changed.wait()
                    continue
                raise self._timed_out(step, waiting_for_policy, timeout_s) from None
            self.progress.changed.clear()
            if waiting_for_policy:
                idle += time.monotonic() - before
        return {"time/rollout": time.monotonic() - started - idle, "time/wait_for_policy": idle}

    def _complete(self, step: int) -> bool:
        """Enough rollouts, and none still running that only this step may train on.

        Waiting for those keeps slow (long) rollouts in the data instead of dropping them as too old. With oversampling there
        are more of them than a batch takes, and none is waited for.
        """
        if self.dispatcher.failure is not None:
            raise self.dispatcher.failure
        self.failures.check(step)
        limit = MAX_EMPTY_BATCHES * self.sink.batch_rollouts(self._group_size)
        if self.sink.filtered_in_a_row >= limit:
            dropped = [rollout for rollout in self.sink.discarded if rollout.dropped]
            raise PrlError(
                f"step {step}: filters.pre_batch dropped {self.sink.filtered_in_a_row} rollouts in a row "
                f"({measure.why_empty(dropped)}), enough for {MAX_EMPTY_BATCHES} batches"
            )
        self.arrivals.check(limit)
        if self.oversampling > 1:
            return self.sink.full()
        last_chance = self._last_chance(step)
        return self.sink.full() and all(g.start_version > last_chance for g in self.dispatcher.in_flight.values())

    def _out_of_tasks(self) -> bool:
        return not self.dispatcher.in_flight and all(env.buffer.ended for env in self.envs)

    def _end_early(self) -> None:
        """All that the envs' tasks gave has been shipped: make the step before this one the last."""
        self.progress.last_step = self.progress.shipped
        tasks = ", ".join(f"{env.name}: {env.buffer.describe()}" for env in self.envs)
        self.ended_because = f"every env has run out of tasks ({tasks})"
        files.write_end(self.run_dir, self.progress.shipped)
        log.warning(
            "the run ends after step %d of %d: %s", self.progress.shipped, self.progress.max_steps, self.ended_because
        )
        if self.sink.discarded:
            write_records(self.run_dir, self.progress.shipped, [], [], self.sink.discarded)

    def _drop_stale(self, version: int) -> int:
        limit = self.config.max_off_policy_steps
        return self.dispatcher.drop_stale(version, limit) + self.sink.drop_stale(version, limit)

    def _drop_surplus(self, step: int) -> None:
        """Discard what no step after `step` may train on."""
        last_chance = math.inf if step == self.progress.max_steps else self._last_chance(step)
        self._surplus += self.dispatcher.drop_surplus(last_chance) + self.sink.drop_surplus(last_chance)

    @property
    def _group_size(self) -> int:
        return max(env.rollouts_per_group for env in self.envs)

    def _last_chance(self, step: int) -> int:
        """The oldest version whose rollouts may train in `step`, and in no later one."""
        return step - 1 - self.config.max_async_level

    def _fill(self) -> bool:
        """Start groups while their rollouts can be trained on in time. False if none is in flight and none can start.

        A rollout that starts from version v may be trained on in steps up to v + 1 + max_async_level. So many batches,
        less those already shipped, may be outstanding: in flight or waiting in the sink. Oversampling multiplies that.
        """
        if self.progress.updating:
            return True
        last_step = min(self.pool.version + 1 + self.config.max_async_level, self.progress.max_steps)
        while True:
            allowed = (
                self.oversampling * (last_step - self.progress.shipped) * self.sink.batch_rollouts(self._group_size)
            )
            if self.dispatcher.rollouts_in_flight + self.sink.rollouts >= allowed:
                if self.dispatcher.in_flight or self.sink.full() or last_step <= self.progress.shipped:
                    return True  # otherwise a token batch was estimated too small: one more group
            if not self.dispatcher.start_group():
                return bool(self.dispatcher.in_flight)

    def _packed(self, step: int, rollouts: list[Rollout]) -> tuple[list[list[MicroBatch]], int]:
        samples = [sample for rollout in rollouts for sample in rollout.samples]
        try:
            return pack(samples, self.seq_len, self.trainer_ranks)
        except ValueError as error:  # an algorithm may be anybody's code
            raise PrlError(f"step {step}: {error}") from error

    async def _ship(self, step: int, rows: list[list[MicroBatch]], truncated: int, line: dict[str, float]) -> None:
        for rank, micro_batches in enumerate(rows):
            files.write_batch(self.run_dir, StepBatch(step, micro_batches, truncated), rank)
        self.progress.lines[step] = line
        self.progress.shipped = step
        self.progress.changed.set()
        if truncated:
            log.warning("step %d: %d samples cut to trainer.seq_len=%d tokens", step, truncated, self.seq_len)

    def _on_end(self, group: Group | None) -> None:
        if group is not None:
            self.failures.add(group)
            try:
                if self.arrivals.admit(group):
                    self.filters.pre_batch.apply(group.rollouts)
                    self.sink.add(group)
                else:
                    self.sink.discarded += group.rollouts
            except Exception as error:  # nobody would see it: asyncio calls this
                self.dispatcher.failure = self.dispatcher.failure or error
        self.progress.changed.set()

    def _warn_few(self, step: int, rollouts: list[Rollout], kept: list[Rollout]) -> None:
        places = [rollout for rollout in rollouts if rollout.in_batch]
        if 10 * len(kept) <= len(places):
            why = measure.why_empty([rollout for rollout in places if rollout not in kept])
            log.warning("step %d: only %d of %d rollouts train: %s", step, len(kept), len(places), why)

    def _warn_empty(self, step: int, empty: int, rollouts: list[Rollout]) -> None:
        why = measure.why_empty(rollouts)
        log.warning(
            "step %d: nothing to train in a batch of %d rollouts (%d in a row): %s", step, len(rollouts), empty, why
        )
        if empty >= MAX_EMPTY_BATCHES:
            raise PrlError(
                f"step {step}: {empty} batches in a row had nothing to train ({why}). "
                "If all rewards of a group are equal, the tasks are too easy or too hard for this model, or group_size is 1"
            )

    def _timed_out(self, step: int, waiting_for_policy: bool, timeout_s: float) -> PrlError:
        if waiting_for_policy:
            return no_policy(step, self.pool.version, timeout_s)
        waiting = sorted({group.env.name for group in self.dispatcher.in_flight.values()})
        return PrlError(
            f"step {step}: {self.sink.rollouts} rollouts after {timeout_s:g} s (orchestrator.batch_timeout_s), "
            f"still waiting for {self.dispatcher.rollouts_in_flight} of env {', '.join(waiting)}"
        )
