"""Records of what each process of a run does and waits for: spans of time, in `events/<process>.jsonl` of the run
directory.

A track is one process, which does one thing at a time; a file has the tracks that one process writes. Times are seconds
since 1970, the same clock for every process of a machine.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

FOLDER = "events"
WAITING = "waiting for "
"""How it begins what a track does that waits; everything else is work, or the start."""
ORCHESTRATOR, ENGINE, TRAINER, EVALUATION = "orchestrator", "engine", "trainer", "evaluation"
"""Names of tracks; further ones are `teacher`, `trainer rank 1`, and `engine 1` where there are several."""
PREPARING, STARTING, ASSEMBLING = "preparing", "starting", "assembling"
GENERATING, LOADING, EVALUATING = "generating", "loading weights", "evaluating"
ROLLOUTS, POLICY, OTHERS = f"{WAITING}rollouts", f"{WAITING}the trainer", f"{WAITING}frozen models"
BATCH = f"{WAITING}a batch"
CUTTING, RECORDING, PACKING, SHIPPING = "cutting and filtering", "recording rollouts", "packing", "shipping"
PROCESSES, EVALUATED = f"{WAITING}engine and trainer", f"{WAITING}the first evaluation"
LAST_UPDATE, LAST_CHECKPOINT = f"{WAITING}the last update", f"{WAITING}the last checkpoint"
MODEL, FORWARD, OPTIMISER = "loading the model", "forward and backward", "optimiser"
EXPORTING, CHECKPOINT = "exporting weights", "checkpoint"

_SINCE_1970 = time.time() - time.monotonic()  # taken once, so that a clock that is set leaves no gap


class Span(msgspec.Struct, frozen=True):
    """One thing that a track did; the times in seconds since 1970."""

    process: str
    """The track."""
    what: str
    start: float
    stop: float
    step: int
    """The training step it was for; of an update or an evaluation, the policy version; of a start, that it begins with.
    """


def now() -> float:
    """The time in seconds since 1970, on a clock that nobody sets."""
    return _SINCE_1970 + time.monotonic()


@dataclass
class Stopwatch:
    """When a block began and ended, by the monotonic clock."""

    started: float
    stopped: float = math.nan

    @property
    def seconds(self) -> float:
        """The time that the block took."""
        return self.stopped - self.started


class Track:
    """Records what one process does, one thing at a time. Without a run directory it counts the time alone."""

    def __init__(self, process: str, run_dir: Path | None = None):
        self.process = process
        self._file: BinaryIO | None = None
        if run_dir is not None:
            path = run_dir / FOLDER / f"{process.replace(' ', '_')}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)  # what a killed process has done is there
        self.step = 0
        """Of what it does."""
        self._what: str | None = None
        self._since = self._spent_s = 0.0

    def beside(self, process: str) -> "Track":
        """Another track in the same file."""
        track = Track(process)
        track._file = self._file
        return track

    @property
    def busy_s(self) -> float:
        """Seconds that it has done anything in."""
        return self._spent_s + (now() - self._since if self._what is not None else 0.0)

    def enter(self, what: str | None, step: int = 0) -> None:
        """From now on it does `what` for `step`; None = nothing. What it did before has ended, and is recorded."""
        if (what, step) == (self._what, self.step):
            return
        at = now()
        if self._what is not None:
            self._spent_s += at - self._since
            if self._file is not None and not self._file.closed:
                span = Span(self.process, self._what, round(self._since, 6), round(at, 6), self.step)
                self._file.write(msgspec.json.encode(span) + b"\n")
        self._what, self.step, self._since = what, step, at

    @contextlib.contextmanager
    def doing(self, what: str, step: int) -> Iterator["Stopwatch"]:
        """Inside the block it does `what`, after it what it did before, nothing or the block around this one.

        The stopwatch has the block's time once the block has ended.
        """
        around, around_step = self._what, self.step
        self.enter(what, step)
        stopwatch = Stopwatch(time.monotonic())
        try:
            yield stopwatch
        finally:
            stopwatch.stopped = time.monotonic()
            self.enter(around, around_step if around is not None else step)

    def close(self) -> None:
        """Record what it does, and close the file."""
        self.enter(None)
        if self._file is not None:
            self._file.close()
