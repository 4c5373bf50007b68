"""Starts whole groups and carries each through its episode and its credit."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.buffer import Buffer
from prl.orchestrator.sampler import Sampler
from prl.rollouts.environment import Environment
from prl.rollouts.rollout import Rollout


@dataclass
class TrainEnv:
    """Everything one env needs to produce credited rollouts."""

    environment: Environment
    buffer: Buffer
    sampler: Sampler
    algorithm: Algorithm
    group_size: int

    @property
    def name(self) -> str:
        return self.environment.name


@dataclass
class Group:
    """All rollouts of one attempt at one task, credited."""

    id: int
    env_name: str
    start_version: int
    rollouts: list[Rollout]

    @property
    def survivors(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.error is None]


@dataclass
class InFlight:
    """A group on its way."""

    env: TrainEnv
    start_version: int
    work: asyncio.Task = field(repr=False)

    @property
    def size(self) -> int:
        return self.env.group_size


class Dispatcher:
    """Keeps groups in flight. Envs share the rollouts by their weights.

    `on_end` gets each finished group, and None where one was cancelled or failed: whoever waits has to look again.
    """

    def __init__(self, envs: list[TrainEnv], on_end: Callable[[Group | None], None]):
        self.envs = envs
        self.on_end = on_end
        self.in_flight: dict[int, InFlight] = {}
        self.failure: BaseException | None = None
        self._ids = itertools.count()
        self._started = dict.fromkeys((env.name for env in envs), 0)

    @property
    def rollouts_in_flight(self) -> int:
        return sum(group.size for group in self.in_flight.values())

    def start_group(self) -> None:
        """Start the next group: of the env that is furthest behind its share."""
        env = min(self.envs, key=lambda env: self._started[env.name] / env.environment.config.weight)
        self._started[env.name] += env.group_size
        group_id = next(self._ids)
        version = env.sampler.version
        work = asyncio.create_task(self._play(env, group_id, version))
        self.in_flight[group_id] = InFlight(env, version, work)
        work.add_done_callback(lambda done: self._ended(group_id, done))

    def drop_stale(self, version: int, max_off_policy_steps: int) -> int:
        """Cancel groups that have spanned too many policy updates. Returns how many rollouts that was."""
        stale = [g for g in self.in_flight.values() if version - g.start_version > max_off_policy_steps]
        for group in stale:
            group.work.cancel()
        return sum(group.size for group in stale)

    async def close(self) -> None:
        """Cancel what is in flight."""
        works = [group.work for group in self.in_flight.values()]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    async def _play(self, env: TrainEnv, group_id: int, version: int) -> Group:
        task = env.buffer.next()
        rollouts = await env.environment.play(task, env.group_size, env.sampler, group_id=group_id)
        await asyncio.gather(*(env.algorithm.finalize_rollout(rollout) for rollout in rollouts))
        await env.algorithm.finalize_group(rollouts)
        return Group(group_id, env.name, version, rollouts)

    def _ended(self, group_id: int, work: asyncio.Task) -> None:
        del self.in_flight[group_id]
        if work.cancelled():
            self.on_end(None)
        elif work.exception() is not None:
            self.failure = self.failure or work.exception()
            self.on_end(None)
        else:
            self.on_end(work.result())
