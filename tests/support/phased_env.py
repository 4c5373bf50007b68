"""Arithmetic whose grader says when it grades, and a filter that says when a batch is being made."""

from collections.abc import Iterator
from dataclasses import dataclass

from phases import announce

from prl.envs.math import MathTask, MathTaskset
from prl.orchestrator.filters.base import Filter
from prl.rollouts.rollout import Rollout

__all__ = ["PhasedTaskset"]


class PhasedTask(MathTask):
    def grade(self, reply: str) -> float:
        announce("scoring")
        return super().grade(reply)


class PhasedTaskset(MathTaskset):
    IN_PROCESS = False

    def load(self) -> Iterator[PhasedTask]:
        for task in super().load():
            yield PhasedTask(task.data, self.config.task)


@dataclass(kw_only=True)
class Packing(Filter):
    """Matches nothing."""

    def matches(self, rollout: Rollout) -> bool:
        announce("packing")
        return False
