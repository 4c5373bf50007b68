"""Types that the stages of the orchestrator hand to each other: the envs of a run, groups of rollouts, and events."""

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from verifiers.v1.task import Task

from prl.algorithms.base import Algorithm
from prl.base.errors import PrlError, of_own_code
from prl.base.user_code import called
from prl.curriculum.base import Curriculum
from prl.engines.chat import ChatSource, check_template
from prl.engines.frozen import FrozenPool
from prl.engines.sampler import Sampler
from prl.envs.environment import Environment
from prl.envs.group import Arrived
from prl.filters.base import Filters
from prl.rollouts.rollout import Rollout

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class EnvComponents:
    """The components of one env: its own where it has them, else the run's, but always instances of its own."""

    algorithm: Algorithm
    sampler: Sampler
    """The source of its training rollouts."""
    eval_sampler: Sampler
    """The policy with the sampling settings of the evaluation."""
    curriculum: Curriculum
    """The source of its tasks."""
    filters: Filters = field(default_factory=dict)
    group_size: int
    """Episodes of one task."""
    loss: str = ""
    """Name of its rl loss function, for its samples; empty = the run's."""


@dataclass(kw_only=True)
class EvalEnv:
    """Everything that one env needs to be evaluated."""

    environment: Environment
    eval_sampler: Sampler
    """The model that is evaluated, with the sampling settings of the evaluation."""

    @property
    def name(self) -> str:
        return self.environment.name


@dataclass(kw_only=True)
class TrainEnv(EnvComponents, EvalEnv):
    """Everything that one env needs to produce credited rollouts."""

    def __post_init__(self) -> None:
        self.weight = self.environment.config.weight
        """Its share among the envs now: of its config, times what its curriculum says."""

    def weigh(self, weight: float) -> None:
        """Give it another share among the envs, which its curriculum has chosen. Raises PrlError for none."""
        if not 0 < weight < math.inf:
            raise PrlError(f"env {self.name!r}: a curriculum's weight must be a number above 0, not {weight}")
        self.weight = weight

    @functools.cached_property
    def positions(self) -> dict[int, int]:
        """The position of each task among the env's, by `id` of the task."""
        return {id(task): number for number, task in enumerate(self.environment.tasks)}

    @property
    def rollouts_per_group(self) -> int:
        """The rollouts of a group: one of each episode and trained agent."""
        return self.group_size * self.environment.seats

    @property
    def waits_for_group(self) -> bool:
        """Return whether a group's rollouts enter a batch together: its algorithm or curriculum compares them."""
        return self.algorithm.waits_for_group or self.curriculum.reads_rewards

    @property
    def up(self) -> bool:
        """Return whether every model that its rollouts need can answer.

        Raises DeadlinePassed if one has been away for longer than its deadline.
        """
        return all(pool.up for pool in self.algorithm.pools)

    @property
    def ended(self) -> bool:
        """Return whether its curriculum has no task to hand out any more."""
        with self.asking():
            return self.curriculum.ended

    def describe(self) -> str:
        """Return the state of its curriculum in a few words."""
        with self.asking():
            return self.curriculum.describe()

    def asking(self) -> contextlib.AbstractContextManager[None]:
        """`called`, for a block that asks its curriculum."""
        return called(f"env {self.name!r}, curriculum", self.curriculum)

    async def setup(self) -> None:
        """Wait for the frozen models."""
        with attribute_errors_to(self):
            waiting = [pool.wait_ready(pool.timeout_s) for pool in self.algorithm.pools]  # the source's, so far
            await asyncio.gather(*waiting, self.algorithm.start())
            await self._agree_on_tokens()

    async def _agree_on_tokens(self) -> None:
        """Sample by messages from a frozen source that exchanges no token ids of the policy's tokenizer."""
        source, probe = self.sampler.pool, self.algorithm.probe
        if probe is not None and isinstance(source, FrozenPool):
            # By token ids a server is not shown what its own processor would make of pictures.
            if self.sampler.pictures is None and await source.shares_tokenizer(probe):
                log.info("env %s samples from %r by token ids", self.name, source.model)
                return
            log.info("env %s samples from %r by chat messages, in the policy's template", self.name, source.model)
            check_template(self.sampler.renderer, f"env {self.name!r} samples from {source.model!r} by chat messages")
            self.sampler = self.sampler.changed({"pool": ChatSource(source)})


@dataclass(eq=False)
class Group:
    """All rollouts of one attempt at one task."""

    id: int
    env: TrainEnv
    start_version: float
    """Policy version that its rollouts started from; infinite if a frozen model generates them: they never age."""
    task: Task
    """The task, as its env's curriculum handed it out."""
    rollouts: list[Rollout] = field(default_factory=list)
    """Those that have arrived; credited once the group is finished. In flight without those that were sent."""
    excused: bool = False
    """A frozen model that its env needs was away: then its failures are not counted against the env."""
    uses: int = 0
    """Times that it has been replayed."""
    sent: list[tuple[int, str]] = field(default_factory=list)
    """Index and agent of the rollouts that went on alone, in groups of their own with this one's id."""

    async def play(self, arrived: Arrived) -> list[Rollout]:
        """Have the env play and grade the episodes; each rollout goes to `arrived` at once. Returns all of them."""
        env = self.env
        return await env.environment.play(self.task, env.group_size, env.sampler, group_id=self.id, arrived=arrived)

    @property
    def coming(self) -> int:
        """Rollouts that have not been sent."""
        return self.env.rollouts_per_group - len(self.sent)

    @property
    def place(self) -> int:
        """Position of the task in its env; -1 where it is not one of the env's."""
        return self.env.positions.get(id(self.task), -1)

    @property
    def survivors(self) -> list[Rollout]:
        """Rollouts that did not fail."""
        return [rollout for rollout in self.rollouts if not rollout.failed]

    @property
    def active(self) -> list[Rollout]:
        """Rollouts that take a place in a batch: those without an outcome."""
        return [rollout for rollout in self.rollouts if rollout.is_active]


Event = Group | None
"""Event that wakes the loop of the orchestrator: a group that has been played, graded and credited. None says that an
update, with the evaluation that followed it if one was due, is over: groups may start again."""


def by_seat(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """Return a group's rollouts by the agent that played them: sides of a game are no baseline for each other."""
    seats: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        seats.setdefault(rollout.agent.name, []).append(rollout)
    return list(seats.values())


@contextlib.contextmanager
def attribute_errors_to(env: TrainEnv) -> Iterator[None]:
    """Raise exceptions of the env's algorithm, which may be the user's own class, as PrlError naming env and class.

    Includes SystemExit and KeyboardInterrupt (`prl.base.user_code.called`), and a CancelledError that the algorithm
    leaks: asyncio would take the work for cancelled, and nobody would learn that it did not finish.
    """
    try:
        yield
    except PrlError:
        raise
    except asyncio.CancelledError as error:
        raise_unless_leaked(error, env.name)
    except GeneratorExit:  # the loop has ended
        raise
    except BaseException as error:
        log.info("env %s: %s failed", env.name, type(env.algorithm).__name__, exc_info=True)
        what = str(error) if isinstance(error, ValueError) else of_own_code(error)
        raise PrlError(f"env {env.name!r}, {type(env.algorithm).__name__}: {what}") from error


def raise_unless_leaked(error: asyncio.CancelledError, env_name: str) -> None:
    """Raise the cancellation if the current task is being cancelled; else it leaked from user code: raise PrlError."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error
    raise PrlError(f"env {env_name!r}: the work on a group was cancelled from within") from None
