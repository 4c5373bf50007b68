"""The interface between the orchestrator and an env's curriculum."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prl.base.logged import EnvPart
from prl.curriculum.replay import ReplayConfig

if TYPE_CHECKING:
    from verifiers.v1.task import Task

    from prl.rollouts.rollout import Rollout


@dataclass(frozen=True)
class Context:
    """The state of the run when it asks a curriculum for a task."""

    step: int = 1
    """The step whose batch is being collected."""
    version: int = 0
    """The policy version that a rollout would start from."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the latest evaluation, as `eval/math/avg@1`; empty before the first."""


@dataclass(kw_only=True, eq=False)
class Curriculum(EnvPart, ABC):
    """Chooses the next task of one env. There is one instance per env.

    A subclass must implement `load` and `next`. The other methods are for difficulty pools and for an env that can run
    out of tasks; their defaults suit a curriculum without both. `update` and `pool_of` get the same task object that
    `next` returned. `state_dict` has the position among the tasks, and all other state that decides the next task;
    without it a resumed run starts with its first tasks. `load_state_dict` is called after `load`.
    """

    online_difficulty_filtering: bool = False
    """Drop a group whose mean reward is 0 or 1, up to rounding, before it takes a place in a batch. For rewards from 0
    to 1."""

    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Replay buffer: train again on groups of earlier batches."""

    where = "curriculum"  # not an option; `check` replaces it
    """The curriculum's config key, for the messages of `load`."""

    def check(self, where: str) -> None:
        """Raise ConfigError for options that contradict each other; `where` is the curriculum's config key."""
        self.where = where

    @property
    def reads_rewards(self) -> bool:
        """Return whether the settings use rewards; with an algorithm that reads no reward the run then warns."""
        return self.online_difficulty_filtering or type(self).update is not Curriculum.update

    @abstractmethod
    def load(self, tasks: "Sequence[Task]", *, seed: int, env_name: str) -> None:
        """Receive the env's tasks. Called once, first; raises ConfigError for tasks or options that cannot work.

        Args:
            tasks: The env's training tasks, at least one.
            seed: Governs every random choice, so that a run can be repeated.
            env_name: For messages and for the files of the difficulty pools.
        """

    @abstractmethod
    def next(self, context: Context) -> "Task":
        """The next task to play. Raises PrlError once the env has ended."""

    def weight(self, context: Context) -> float:
        """Factor of the env's `weight` from now on, above 0: changes the mix of envs by step or by reward."""
        return 1.0

    def update(self, task: "Task", *rewards: float) -> str | None:
        """Receive the mean reward of a finished group of `task`, one value per trained agent.

        Returns the difficulty pool that the task is in now; None without pools.
        """
        return None

    def observe(self, group: "list[Rollout]") -> None:
        """Receive the rollouts of a finished group, like `Algorithm.observe`; called after `update`."""

    def returns(self, task: "Task") -> bool:
        """Return whether `next` may hand out `task` again."""
        return True

    @property
    def ended(self) -> bool:
        """Return whether the env has no task left for the rest of the run."""
        return False

    @property
    def pooled(self) -> bool:
        """Return whether tasks are kept in difficulty pools, to be reported and saved with each checkpoint."""
        return False

    def pool_of(self, task: "Task") -> str | None:
        """The difficulty pool that `task` is in: easy, normal or hard; None without pools."""
        return None

    def counts(self) -> dict[str, int]:
        """Tasks in each difficulty pool; empty without pools."""
        return {}

    def describe(self) -> str:
        """The state of the curriculum in a few words, for messages."""
        return ", ".join(f"{count} {pool}" for pool, count in self.counts().items())

    def retired_to(self, pool: str) -> list[dict[str, Any]]:
        """The tasks of a difficulty pool as plain data, to be saved with a checkpoint."""
        return []

    def take_evicted(self) -> Counter[str]:
        """The number of tasks moved into each pool since the last call."""
        return Counter()
