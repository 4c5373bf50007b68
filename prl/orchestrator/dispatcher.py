"""Starts whole groups and carries each through its episode and its credit."""

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from prl.errors import PrlError
from prl.orchestrator.types import Group, TrainEnv, blaming, by_seat
from prl.rollouts.rollout import Rollout

log = logging.getLogger(__name__)


@dataclass
class InFlight:
    """A group on its way."""

    env: TrainEnv
    start_version: float
    work: asyncio.Task = field(repr=False)
    cancelled: bool = False
    """Whether nobody wants it any more: it may have come to its end before it heard of that."""

    @property
    def size(self) -> int:
        return self.env.rollouts_per_group


class Dispatcher:
    """Keeps groups in flight. Envs share the rollouts by their weights.

    `on_end` gets each finished group, and None where one was cancelled or failed: whoever waits has to look again.
    """

    def __init__(self, envs: list[TrainEnv], on_end: Callable[[Group | None], None]):
        self.envs = envs
        self.on_end = on_end
        self.in_flight: dict[int, InFlight] = {}
        self.failure: BaseException | None = None
        self.closing = False
        self._ids = itertools.count()
        self._started = dict.fromkeys((env.name for env in envs), 0.0)

    @property
    def rollouts_in_flight(self) -> int:
        return sum(group.size for group in self.in_flight.values())

    def start_group(self) -> bool:
        """Start the next group: of the env that is furthest behind its share. False while no env can.

        An env whose models are away is passed over, and has no claim to what it missed; one without tasks for good.
        """
        share = {env.name: self._started[env.name] / env.environment.config.weight for env in self.envs}
        ready = [env for env in self.envs if not env.buffer.ended and env.up]
        if not ready:
            return False
        env = min(ready, key=lambda env: share[env.name])
        for other in self.envs:
            if other not in ready:
                self._started[other.name] = max(share[other.name], share[env.name]) * other.environment.config.weight
        self._started[env.name] += env.rollouts_per_group
        group_id = next(self._ids)
        version = math.inf if env.sampler.version is None else env.sampler.version
        work = asyncio.create_task(self._play(env, env.buffer.next(), group_id, version))
        self.in_flight[group_id] = InFlight(env, version, work)
        work.add_done_callback(lambda done: self._ended(group_id, done))
        return True

    def drop_stale(self, version: int, max_off_policy_steps: int) -> int:
        """Cancel groups that have spanned too many policy updates. Returns how many rollouts that was."""
        return self._cancel(lambda group: version - group.start_version > max_off_policy_steps)

    def drop_surplus(self, last_chance: float) -> int:
        """Cancel groups that started from version `last_chance` or before. Returns how many rollouts that was."""
        return self._cancel(lambda group: group.start_version <= last_chance)

    def _cancel(self, which: Callable[[InFlight], bool]) -> int:
        chosen = [group for group in self.in_flight.values() if not group.cancelled and which(group)]
        for group in chosen:
            group.cancelled = True
            group.work.cancel()
        return sum(group.size for group in chosen)

    async def close(self) -> None:
        """Cancel what is in flight."""
        self.closing = True
        works = [group.work for group in self.in_flight.values()]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    async def _play(self, env: TrainEnv, task: Any, group_id: int, version: float) -> Group:
        limit_s, now = env.environment.config.group_timeout_s, asyncio.get_running_loop().time

        def deadline() -> float | None:
            return None if limit_s is None else now() + limit_s

        async def in_time(credit: Awaitable[None], rollouts: list[Rollout], until: float | None) -> None:
            try:
                async with asyncio.timeout_at(until) as clock:
                    with blaming(env):
                        await credit
            except TimeoutError:
                if not clock.expired():
                    raise
                late = f"not scored when its group had taken {limit_s:g} s (envs.{env.name}.group_timeout_s)"
                for rollout in rollouts:
                    if rollout.left_out is None:
                        rollout.fail(TimeoutError(late), "timeout")

        played = deadline()

        async def score(rollout: Rollout) -> None:
            await in_time(env.algorithm.finalize_rollout(rollout), [rollout], played)

        rollouts = await env.environment.play(task, env.group_size, env.sampler, group_id=group_id, arrived=score)
        credited = deadline()  # of its own: what used up the first has failed, and the rest is credited
        for seat in by_seat(rollouts):
            await in_time(env.algorithm.finalize_group(seat), seat, credited)
        return Group(group_id, env.name, version, rollouts, excused=not env.up, task=task)

    def _ended(self, group_id: int, work: asyncio.Task) -> None:
        group = self.in_flight.pop(group_id)
        if work.cancelled():
            if not group.cancelled and not self.closing:  # code of an algorithm's that let a cancellation escape
                self.failure = self.failure or PrlError(
                    f"env {group.env.name!r}: the work on a group was cancelled from within"
                )
            self.on_end(None)
        elif work.exception() is not None:
            self.failure = self.failure or work.exception()
            self.on_end(None)
        else:
            self.on_end(None if group.cancelled else work.result())
