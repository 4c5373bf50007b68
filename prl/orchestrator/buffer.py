"""Which task comes next."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class BufferConfig:
    """Goes through an env's tasks in passes."""

    _target_: str = "prl.orchestrator.buffer.Buffer"
    shuffle: bool = True
    """Reorder the tasks before each pass (seeded)."""


class Buffer:
    """The tasks of one env, handed out in passes: none comes twice before all have come once."""

    def __init__(self, config: BufferConfig, tasks: Sequence, seed: int):
        self.tasks = tasks
        self.shuffle = config.shuffle
        self.random = random.Random(seed)
        self.passes = 0
        self._order: list[int] = []

    def next(self):
        """The next task."""
        if not self._order:
            self.passes += 1
            self._order = list(range(len(self.tasks)))
            if self.shuffle:
                self.random.shuffle(self._order)
            self._order.reverse()
        return self.tasks[self._order.pop()]
