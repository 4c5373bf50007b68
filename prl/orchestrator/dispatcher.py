"""Start whole groups, play them, give their rollouts their credit, and emit each group when it is finished."""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from prl.base.errors import PrlError
from prl.curriculum.base import Context
from prl.envs.group import Arrived
from prl.envs.isolation import task_group
from prl.orchestrator.state import DispatcherState, SavedTask
from prl.orchestrator.types import Event, Group, TrainEnv, attribute_errors_to, by_seat, raise_unless_leaked
from prl.rollouts.rollout import Rollout

log = logging.getLogger(__name__)


class Dispatcher:
    """Keeps groups in flight. Envs share the rollouts by their weights.

    Invariant: every started group ends exactly once. It is emitted as an event, or dropped, or its exception is
    raised out of `running`. `in_flight` holds the groups that have not ended, each with its task.
    """

    _tasks: asyncio.TaskGroup
    """Groups can be started only inside `running`, which sets it."""

    def __init__(self, envs: list[TrainEnv], events: asyncio.Queue[Event]):
        self.envs = envs
        self.events = events
        self.largest_group = max(env.rollouts_per_group for env in envs)
        """Rollouts of the largest group that may start."""
        self.in_flight: dict[Group, asyncio.Task[None]] = {}
        self.next_id = 0
        self.started = dict.fromkeys((env.name for env in envs), 0.0)
        """Rollouts started of each env, those of an absent env raised to its share."""
        self._again: deque[Group] = deque()
        """Groups that were in flight when the run was cut off."""

    def state_dict(self) -> DispatcherState:
        """Return what the run goes on with after an interruption: counts, and the tasks that are still to be played."""
        groups = (*self.in_flight, *self._again)
        tasks = [SavedTask(group.id, group.env.name, group.place, list(group.sent)) for group in groups]
        return DispatcherState(self.next_id, dict(self.started), tasks, {env.name: env.weight for env in self.envs})

    def load_state_dict(self, state: DispatcherState) -> None:
        """Continue the counts of an earlier part of the run; its tasks in flight are started first."""
        envs = {env.name: env for env in self.envs}
        self.next_id = state.next_group
        self.started |= state.started
        for name, env in envs.items():
            env.weigh(state.weights.get(name, env.weight))
        for saved in state.in_flight:
            # A task that the curriculum made itself (-1) cannot be found again.
            if saved.task >= 0 and saved.env in envs:
                env = envs[saved.env]
                task = env.environment.tasks[saved.task]
                self._again.append(Group(saved.group, env, math.inf, task, sent=saved.sent))
        if lost := len(state.in_flight) - len(self._again):
            log.warning("%d tasks that were in flight are not among their envs' tasks, and are not played again", lost)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Dispatcher"]:
        """Allow groups to be started inside the block. At its end the groups in flight are cancelled.

        Raises:
            Exception: What the work on a group raised; the block is cancelled.
        """
        async with task_group() as self._tasks:
            try:
                yield self
            finally:
                self.drop(math.inf)

    @property
    def rollouts_in_flight(self) -> int:
        return self.rollouts_since(-math.inf)

    def rollouts_since(self, version: float) -> int:
        """Return the number of rollouts in flight of groups that started from `version` or later."""
        return sum(group.coming for group in self.in_flight if group.start_version >= version)

    def arrived(self, version: float) -> list[Rollout]:
        """Return the rollouts that have arrived of groups in flight which started from `version` or before."""
        return [rollout for group in self.in_flight if group.start_version <= version for rollout in group.rollouts]

    def start_group(self, context: Context | None = None) -> int:
        """Start the next group, of the env furthest behind its share. Returns its rollouts, 0 if none can start.

        The curricula are told the `context`; None = that of a run which begins.
        An env whose models are away is passed over and does not catch up on what it missed. An env without tasks is
        passed over for good.
        """
        # Tasks that an interruption cut off come first: their curricula have handed them out already.
        if self._again and self._again[0].env.up:
            return self._start(self._again.popleft())
        context = context or Context()
        self._weigh(context)
        share = {env.name: self.started[env.name] / env.weight for env in self.envs}
        ready = [env for env in self.envs if not env.ended and env.up]
        if not ready:
            return 0
        env = min(ready, key=lambda env: share[env.name])
        for other in self.envs:
            if other not in ready:
                # As if it had kept up: it does not make up for its absence when it is back.
                self.started[other.name] = max(share[other.name], share[env.name]) * other.weight
        self.started[env.name] += env.rollouts_per_group
        with env.asking():
            task = env.curriculum.next(context)
        self.next_id += 1
        return self._start(Group(self.next_id - 1, env, math.inf, task))

    def _weigh(self, context: Context) -> None:
        """Let the curricula change the weights of their envs. An env stays as many rollouts ahead as it was."""
        behind = min(self.started[env.name] / env.weight for env in self.envs)
        for env in self.envs:
            with env.asking():
                weight = env.environment.config.weight * env.curriculum.weight(context)
            self.started[env.name] += behind * (weight - env.weight)
            env.weigh(weight)

    def _start(self, group: Group) -> int:
        # Else a frozen model plays, and the group never becomes too old.
        if group.env.sampler.version is not None:
            group.start_version = group.env.sampler.version
        self.in_flight[group] = self._tasks.create_task(self._play(group))
        return group.coming

    def drop(self, last_chance: float) -> int:
        """Cancel groups that started from version `last_chance` or before. Returns their number of rollouts.

        They end now. Their tasks may stop later; what they return is ignored.
        """
        dropped = [group for group in self.in_flight if group.start_version <= last_chance]
        for group in dropped:
            # No longer in flight: what its task still does counts for nothing.
            self.in_flight.pop(group).cancel()
        return sum(group.coming for group in dropped)

    def no_batch(self, step: int, waiting: int, timeout_s: float) -> PrlError:
        """The error for a batch that did not fill in time, where so many rollouts wait for it."""
        missing = sorted({group.env.name for group in self.in_flight})
        return PrlError(
            f"step {step}: {waiting} rollouts after {timeout_s:g} s (orchestrator.batch_timeout_s), still waiting for "
            f"{self.rollouts_in_flight} of env {', '.join(missing)}"
        )

    async def _play(self, group: Group) -> None:
        try:
            await play_and_credit(group, group.play, self._send)
        except asyncio.CancelledError as error:
            # Code of the env may have raised it by itself: the group would be missing for ever.
            raise_unless_leaked(error, group.env.name)
        except Exception:
            if group in self.in_flight:
                raise
            # Nobody waits for a dropped group: what its env's clean-up raises costs nothing.
            log.info("env %s: a cancelled group failed while it stopped", group.env.name, exc_info=True)
        else:
            if self.in_flight.pop(group, None) is not None:
                self.events.put_nowait(group)

    def _send(self, group: Group, rollout: Rollout) -> None:
        """Emit a rollout alone, if its group is still in flight."""
        if group in self.in_flight:
            # The group goes on without it: others of its rollouts are still played.
            group.rollouts.remove(rollout)
            group.sent.append((rollout.index, rollout.agent.name))
            self.events.put_nowait(replace(group, rollouts=[rollout], sent=[]))


async def play_and_credit(
    group: Group, play: Callable[[Arrived], Awaitable[list[Rollout]]], send: Callable[[Group, Rollout], None]
) -> None:
    """Play, grade and credit the rollouts of a group.

    Each rollout is scored (`finalize_rollout`, which may call models) as soon as it is graded, while others of the
    group are still played: a slow grader or scorer delays its own rollout only. When all are scored, each seat is
    credited (`finalize_group`). Of an env that does not wait for groups each rollout is credited as soon as it is
    scored, and goes to `send`.

    Invariant: every rollout comes back, in the order of its episodes, or has been sent, by an earlier part of the run
    perhaps; and is either credited or has an outcome. Scoring ends `group_timeout_s` after the start. Crediting the
    group has a deadline of the same length of its own: whatever used up the first one has failed, and the other
    rollouts still get their credit.

    Args:
        group: The group, without rollouts.
        play: Plays the episodes and hands over each graded rollout; returns all, in the order of their episodes.
        send: Takes each credited rollout of an env that does not wait for groups.

    Raises:
        PrlError: The algorithm failed; the message names the env and the class.
        DeadlinePassed: A frozen model that the env needs was away for too long.
    """
    env = group.env
    now = asyncio.get_running_loop().time
    started = now()

    async def score(rollout: Rollout) -> None:
        if not is_sent(rollout):
            group.rollouts.append(rollout)
            await _score(group, rollout, started)
            if not env.waits_for_group:
                await credit([rollout])
                send(group, rollout)

    def is_sent(rollout: Rollout) -> bool:
        return (rollout.index, rollout.agent.name) in group.sent

    async def credit(rollouts: list[Rollout]) -> None:
        scored = now()
        for seat in by_seat(rollouts):
            await _in_time(env, env.algorithm.finalize_group(seat), seat, scored)
        for rollout in rollouts:
            for sample in rollout.samples:
                sample.loss = env.loss

    group.rollouts = [rollout for rollout in await play(score) if not is_sent(rollout)]  # in the episodes' order
    await credit(group.rollouts)
    group.excused = group.excused or not env.up


async def _score(group: Group, rollout: Rollout, started: float) -> None:
    """Score a rollout on arrival. Excuse its group if it has failed while a frozen model that its env needs is away.

    Looked at for each rollout: the model may be back when the group ends.
    """
    await _in_time(group.env, group.env.algorithm.finalize_rollout(rollout), [rollout], started)
    group.excused = group.excused or (rollout.failed and not group.env.up)


async def _in_time(env: TrainEnv, scoring: Awaitable[None], rollouts: list[Rollout], started: float) -> None:
    """Await `scoring`. `group_timeout_s` after `started`, in the event loop's time, it is cancelled, and those of its
    rollouts that are active fail.
    """
    limit_s = env.environment.config.group_timeout_s
    try:
        async with asyncio.timeout_at(None if limit_s is None else started + limit_s) as clock:
            with attribute_errors_to(env):
                await scoring
    except TimeoutError:
        if not clock.expired():  # the scoring's own, which is an error of the algorithm
            raise
        late = f"not scored when its group had taken {limit_s:g} s (envs.{env.name}.group_timeout_s)"
        for rollout in rollouts:
            rollout.fail(TimeoutError(late), "timeout")
