"""A group to be played: `n` attempts at one task."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verifiers.v1.task import Task
from verifiers.v1.trace import Trace

from prl.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from prl.inference.sampler import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """What the players of `single_turn` and `verifiers_env` are asked for."""

    env_name: str
    task: Task
    n: int
    """Number of attempts."""
    sampler: "Sampler"
    group_id: int
    timeout_s: float
    """[s] Time for an attempt, its grading included; infinite where there is no limit."""

    @property
    def key(self) -> str:
        """Name of the group among the requests of a run, from which seeds are derived."""
        return f"{self.env_name}/{self.task.key}/{self.group_id}"

    def new_rollout(self, trace: Trace, index: int, start_version: int | None) -> Rollout:
        """Return the rollout of attempt `index` over `trace`, which was begun under policy version `start_version`."""
        rollout = Rollout(
            trace,
            env_name=self.env_name,
            group_id=self.group_id,
            start_version=start_version,
            temperature=self.sampler.temperature,
        )
        rollout.index = index
        return rollout

    def timeout_error(self) -> TimeoutError:
        """Return the error of an attempt that took longer than `timeout_s`."""
        return TimeoutError(
            f"not finished after {self.timeout_s:g} s (timeout_s or group_timeout_s of envs.{self.env_name})"
        )
