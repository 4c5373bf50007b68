"""Metrics lines of steps, from the batch of a step until the monitors have its line."""

import asyncio
import time
from collections.abc import Iterable
from typing import NamedTuple

from prl.monitors.base import Monitors
from prl.orchestrator.metrics import line_of_step


class Mark(NamedTuple):
    """The moment when a line was made; of the first line: when the run began."""

    at: float
    """On the monotonic clock, seconds."""
    busy_s: float
    """Seconds for which the engines had worked by then."""


class StepLines:
    """Follows each step of the run, and joins its metrics line from what becomes known on the way.

    A line begins when the batch of its step is shipped. It gets the trainer's metrics once the step is trained, and
    those of loading and of evaluating the version that the step made, unless the engines skip that version.

    Invariant: every shipped step gets one line, in order, once a version that contains the step is loaded. The line
    that may be the last of a run that ends early is kept back until it is known to be the last or not.

    Args:
        monitors: Receive the lines.
        max_steps: Steps of the run.
        half: Engine or trainer computes in 16 bits.
    """

    def __init__(self, monitors: Monitors, max_steps: int, half: bool):
        self.monitors = monitors
        self.max_steps = max_steps
        self.half = half
        self.last = max_steps
        """The last step of the run: `max_steps`, or less once it is known that the run ends early."""
        self.shipped = 0
        """The last step whose batch has been shipped."""
        self.trained = 0
        """The last step that the trainer has finished."""
        self.batch_sent = asyncio.Event()
        """Set by each batch that is shipped; whoever waits for one clears it."""
        self._shipped: dict[int, dict[str, float]] = {}
        """Lines of steps that the trainer has not finished, by step."""
        self._trained: list[dict[str, float]] = []
        """Lines of finished steps that no monitor has, in order."""
        self._mark = Mark(0.0, 0.0)

    def state_dict(self) -> list[dict[str, float]]:
        """Return the lines of trained steps that no monitor has, as they are now."""
        return [dict(line) for line in self._trained]  # copies: the metrics of an update are added later

    def load_state_dict(self, lines: Iterable[dict[str, float]], step: int) -> None:
        """Go on from the checkpoint of `step`, with the `lines` that no monitor had then."""
        self.shipped = step
        self.trained = step
        self._trained = list(lines)

    def begin(self, busy_s: float) -> None:
        """Begin to measure the time of the first step, when the engines have worked for `busy_s` seconds."""
        self._mark = Mark(time.monotonic(), busy_s)

    def ship(self, step: int, line: dict[str, float]) -> None:
        """Begin the line of `step`, whose batch has been shipped, with the metrics of its rollouts."""
        self.shipped = step
        self._shipped[step] = line
        self.batch_sent.set()

    def end_at(self, step: int) -> None:
        """Make `step` the last of the run, in place of `max_steps`."""
        self.last = step

    def train(self, known: dict[str, float], trained: dict[str, float], busy_s: float) -> None:
        """Take the metrics of the step after `self.trained`, which the trainer has finished.

        Args:
            known: Metrics of the engines, and of an evaluation that has just ended.
            trained: The trainer's metrics.
            busy_s: Seconds for which the engines have worked until now.
        """
        self.trained += 1
        before = self._mark
        self._mark = Mark(time.monotonic(), busy_s)
        line = {"step": self.trained} | self._shipped.pop(self.trained) | known
        # The time of a step is that between two lines: steps overlap, so it has no beginning of its own.
        wall_s = self._mark.at - before.at
        self._trained.append(line_of_step(line, trained, wall_s, busy_s - before.busy_s, half=self.half))

    def add(self, version: int, metrics: dict[str, float]) -> None:
        """Add to the line of the step that made `version`, unless the monitors have it."""
        for line in self._trained:
            if line["step"] == version:
                line |= metrics

    def hand_on(self, loaded: int, *, stopping: bool) -> None:
        """Give the monitors the lines up to that of version `loaded`, less the one that may be the last.

        Args:
            loaded: The version that the engines have.
            stopping: Early stopping ends the run as soon as it can.
        """
        # The evaluation of the last version belongs into its line, and nobody knows yet which version that is.
        ending = stopping or self.last < self.max_steps
        while self._trained and self._trained[0]["step"] <= loaded:
            if ending and self._trained[0]["step"] == self.shipped < self.max_steps:
                return
            # It stays if a monitor fails: a checkpoint has the lines that are left.
            self.monitors.step(self._trained[0])
            del self._trained[0]

    def take_kept_back(self) -> dict[str, float]:
        """Return the line that no monitor has when the run ends, which is its last; {} where there is none."""
        return self._trained.pop(0) if self._trained else {}
