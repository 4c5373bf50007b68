"""Start whole groups, keep them in flight, and emit each one when it ends."""

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from verifiers.v1.task import Task

from prl.orchestrator.credit import play_and_credit
from prl.orchestrator.types import (
    Event,
    GroupCancelled,
    GroupFinished,
    TrainEnv,
    raise_unless_leaked,
    task_group,
)

log = logging.getLogger(__name__)


@dataclass
class InFlight:
    """A group that is being played."""

    id: int
    env: TrainEnv
    start_version: float
    """Policy version that it starts from; infinite if a frozen model generates."""
    work: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """Rollouts that it will have."""
        return self.env.rollouts_per_group


class Dispatcher:
    """Keeps groups in flight. Envs share the rollouts by their weights.

    Invariant: every started group ends exactly once. It is emitted as GroupFinished or as GroupCancelled, or its
    exception is raised out of `running`. `in_flight` holds the groups that have not ended.
    """

    def __init__(self, envs: list[TrainEnv], events: asyncio.Queue[Event]):
        self.envs = envs
        self.events = events
        self.in_flight: dict[int, InFlight] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._ids = itertools.count()
        self._started = dict.fromkeys((env.name for env in envs), 0.0)
        """Rollouts started of each env, those of an absent env raised to its share."""

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
                self._cancel(lambda group: True)

    @property
    def rollouts_in_flight(self) -> int:
        return sum(group.size for group in self.in_flight.values())

    def start_group(self) -> bool:
        """Start the next group, of the env that is furthest behind its share. Returns False if no env can start one.

        An env whose models are away is passed over and does not catch up on what it missed. An env without tasks is
        passed over for good.
        """
        if self._tasks is None:
            raise RuntimeError("groups can be started only inside `running`")
        share = {env.name: self._started[env.name] / env.environment.config.weight for env in self.envs}
        ready = [env for env in self.envs if not env.buffer.ended and env.up]
        if not ready:
            return False
        env = min(ready, key=lambda env: share[env.name])
        for other in self.envs:
            if other not in ready:
                self._started[other.name] = max(share[other.name], share[env.name]) * other.environment.config.weight
        self._started[env.name] += env.rollouts_per_group
        version = math.inf if env.sampler.version is None else env.sampler.version
        group = InFlight(next(self._ids), env, version)
        self.in_flight[group.id] = group
        group.work = self._tasks.create_task(self._play(group, env.buffer.next()))
        return True

    def drop_stale(self, version: int, limit: int) -> int:
        """Cancel groups that started more than `limit` versions before `version`. Returns their number of rollouts."""
        return self._cancel(lambda group: version - group.start_version > limit)

    def drop_surplus(self, last_chance: float) -> int:
        """Cancel groups that started from version `last_chance` or before. Returns their number of rollouts."""
        return self._cancel(lambda group: group.start_version <= last_chance)

    def _cancel(self, which: Callable[[InFlight], bool]) -> int:
        """End the chosen groups as cancelled, now. Their tasks may stop later; what they return is ignored."""
        chosen = [group for group in self.in_flight.values() if which(group)]
        for group in chosen:
            del self.in_flight[group.id]
            if group.work is not None:
                group.work.cancel()
            self.events.put_nowait(GroupCancelled(group.id, group.env.name))
        return sum(group.size for group in chosen)

    async def _play(self, flight: InFlight, task: Task) -> None:
        env = flight.env
        try:
            group = await play_and_credit(env, task, flight.id, flight.start_version)
        except asyncio.CancelledError as error:
            raise_unless_leaked(error, env.name)
        except Exception:
            if flight.id in self.in_flight:
                raise
            log.info("env %s: a cancelled group failed while it stopped", env.name, exc_info=True)
        else:
            if self.in_flight.pop(flight.id, None) is not None:
                self.events.put_nowait(GroupFinished(group))
