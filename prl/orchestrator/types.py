"""What the stages of the orchestrator hand to each other: an env of the run, and a group of rollouts."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

from prl.episodes.environment import Environment
from prl.errors import PrlError
from prl.inference.sampler import Sampler
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.buffer import Buffer
from prl.rollouts.rollout import Rollout

log = logging.getLogger(__name__)


@dataclass
class TrainEnv:
    """Everything one env needs to produce credited rollouts."""

    environment: Environment
    buffer: Buffer
    sampler: Sampler
    """The source of its training rollouts."""
    policy_sampler: Sampler
    """The policy, for evaluation; `sampler` itself unless a frozen model generates the rollouts."""
    algorithm: Algorithm
    group_size: int

    @property
    def name(self) -> str:
        return self.environment.name

    @property
    def rollouts_per_group(self) -> int:
        """Rollouts that a group leaves: one of each episode and trained agent."""
        return self.group_size * self.environment.seats

    @property
    def up(self) -> bool:
        """Whether every model that its rollouts need can answer. Raises DeadlinePassed when one is away for too long."""
        return all(pool.up for pool in (self.sampler.pool, *self.algorithm.pools))

    async def setup(self) -> None:
        """Wait for the frozen models."""
        with blaming(self):
            await asyncio.gather(self.sampler.setup(), self.algorithm.setup())

    async def close(self) -> None:
        await self.sampler.close()
        await self.algorithm.close()


@dataclass
class Group:
    """All rollouts of one attempt at one task, credited."""

    id: int
    env_name: str
    start_version: float
    """Policy version its rollouts started from; infinite where a frozen model generates: such rollouts never age."""
    rollouts: list[Rollout]
    excused: bool = False
    """Whether a frozen model that its env needs was away: then its failure says nothing about the env."""
    task: Any = None
    """The task, as its env's buffer handed it out."""

    @property
    def survivors(self) -> list[Rollout]:
        """Those that did not fail."""
        return [rollout for rollout in self.rollouts if rollout.error is None]

    @property
    def for_batch(self) -> list[Rollout]:
        """Those of the survivors that no filter has dropped before a batch is cut."""
        return [rollout for rollout in self.rollouts if rollout.in_batch]


def by_seat(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """A group's rollouts by the agent that left them: the sides of a game are no baseline for each other."""
    seats: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        seats.setdefault(rollout.agent.name, []).append(rollout)
    return list(seats.values())


@contextlib.contextmanager
def blaming(env: TrainEnv):
    """An algorithm's exception as an error that says whose it is; an algorithm may be anybody's code."""
    try:
        yield
    except PrlError:
        raise
    except Exception as error:
        log.exception("env %s: %s failed", env.name, type(env.algorithm).__name__)
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise PrlError(f"env {env.name!r}, {type(env.algorithm).__name__}: {what}") from error
