"""The picture of a run: `timeline.html` in its directory, a lane for each process over time. One file, which zooms."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prl.errors import ConfigError
from prl.report.html import data_block, render
from prl.report.overlap import LaneShares, Overlap, Times, lanes_of, overlap, read_spans, union, windows
from prl.report.runs import Run
from prl.report.verdict import duration, percent
from prl.text import safe
from prl.wire.events import (
    ASSEMBLING,
    CHECKPOINT,
    EVALUATING,
    EXPORTING,
    FORWARD,
    GENERATING,
    LOADING,
    MODEL,
    OPTIMISER,
    OWN_WORK,
    PREPARING,
    STARTING,
    TRAINER,
    WAITING,
    Span,
)
from prl.wire.files import write_atomically

KINDS = {
    GENERATING: ("s0", (GENERATING,)),
    FORWARD: ("s2", (FORWARD,)),
    OPTIMISER: ("s6", (OPTIMISER,)),
    "weights out of the trainer, into the engine": ("s1", (EXPORTING, LOADING)),
    EVALUATING: ("s3", (EVALUATING,)),
    "the orchestrator's own work": ("s4", OWN_WORK),
    CHECKPOINT: ("s5", (CHECKPOINT,)),
    "start": ("s7", (PREPARING, STARTING, ASSEMBLING, MODEL)),
    "waiting": ("line", ()),
    "other": ("dim", ()),
}
"""What is drawn in a colour of its own: the class of the style sheet, and what lanes do that is of the kind."""
KIND_OF = {what: kind for kind, (_, all_of_it) in KINDS.items() for what in all_of_it}
MOST = 100_000
"""Spans of a picture; of more, the last are drawn."""
GAP_S, LEFT_S = 20.0, 3.0
"""Time in which nothing was done, as between a run and its going on: longer than the first, it is drawn as the second.
"""


def write_timeline(run: Run, steps: tuple[int, int] | None = None) -> tuple[Path, Overlap | None]:
    """Write `timeline.html` into the directory of a run, whatever state it is in: all of it, or some of its steps.

    Returns:
        Its path, and who was at work; None where no step was made.

    Raises ConfigError where the run has no events, or none of the steps.
    """
    spans = read_spans(run.dir, run.problems, steps=run.result.steps)
    if not spans:
        raise ConfigError(f"{run.dir} has no events: it has not begun, or was made by a prl that recorded none")
    shown = spans if steps is None else _within(spans, steps, run)
    found, path = overlap(spans, steps), run.dir / "timeline.html"
    page = render(
        "timeline.html.j2",
        script="timeline.js",
        title=f"{run.name} · timeline · prl",
        name=run.name,
        problems=run.problems,
        sentence=found.sentence if found else "No step was made.",
        rows=rows(found),
        over=over(found, steps),
        left_out=max(0, len(shown) - MOST),
        safe=safe,
        data=data_block("data", data(shown[-MOST:])),
    )
    write_atomically(path, page.encode("utf-8", "backslashreplace"))
    return path, found


def _within(spans: Sequence[Span], steps: tuple[int, int], run: Run) -> list[Span]:
    """What was done while the steps were made."""
    times = windows(spans, steps)
    if not times:
        raise ConfigError(f"{run.dir} has no events of step {steps[0]} to {steps[1]}: it has made {run.result.steps}")
    start, stop = times[0][0], times[-1][1]
    return [span for span in spans if span.stop > start and span.start < stop]


def over(found: Overlap | None, steps: tuple[int, int] | None) -> str:
    """Of which time the shares are."""
    if found is None:
        return ""
    if steps is not None:
        return f"shares of the {duration(found.seconds)} of steps {steps[0]} to {steps[1]}"
    return f"shares of the {duration(found.seconds)} from the first batch to the last update; the start is left out"


def rows(found: Overlap | None) -> list[list[str]]:
    """Of each process: its name, its share at work, with what, and what it waited for."""
    lanes: list[LaneShares] = found.lanes if found else []
    return [[lane.process, percent(lane.busy), listed(lane.did), listed(lane.waited)] for lane in lanes]


def listed(shares: dict[str, float]) -> str:
    """`generating 90 %, loading weights 2 %`, without what rounds to nothing."""
    return ", ".join(f"{what} {percent(share)}" for what, share in shares.items() if share >= 0.005)


def data(spans: Sequence[Span]) -> dict[str, Any]:
    """What the page's script draws; times in seconds from the first span on, without long gaps."""
    lanes = {name: place for place, name in enumerate(lanes_of(spans))}
    whats = {what: place for place, what in enumerate(dict.fromkeys(span.what for span in spans))}
    done = union((span.start, span.stop) for span in spans)
    at = _Clock(done)
    kinds = list(KINDS)
    ends: dict[int, float] = {}
    for span in spans:
        if span.process == TRAINER and span.what in (FORWARD, OPTIMISER, EXPORTING):
            ends[span.step] = at(span.stop)
    return {
        "lanes": list(lanes),
        "kinds": [[kind, colour] for kind, (colour, _) in KINDS.items()],
        "whats": [[what, kinds.index(kind_of(what))] for what in whats],
        "spans": [[lanes[span.process], whats[span.what], at(span.start), at(span.stop), span.step] for span in spans],
        "steps": sorted(ends.items()),
        "gaps": at.gaps,
    }


def kind_of(what: str) -> str:
    """The kind of what a lane did."""
    return "waiting" if what.startswith(WAITING) else KIND_OF.get(what, "other")


class _Clock:
    """Seconds from the first thing done on, where long times in which nothing was done are cut short."""

    def __init__(self, done: Times):
        self._pieces: list[tuple[float, float]] = []  # from a time on, what to take off
        self.gaps: list[tuple[float, str]] = []
        """Where time was cut out, and how much."""
        off = before = done[0][0] if done else 0.0
        for start, stop in done:
            if (gap := start - before) > GAP_S:
                off += gap - LEFT_S
                self.gaps.append((round(start - off - LEFT_S / 2, 4), duration(gap)))
            self._pieces.append((start, off))
            before = stop
        self._place = 0

    def __call__(self, time: float) -> float:
        """Times of the spans come nearly in order."""
        pieces = self._pieces
        while self._place + 1 < len(pieces) and pieces[self._place + 1][0] <= time:
            self._place += 1
        while self._place and pieces[self._place][0] > time:
            self._place -= 1
        return round(time - pieces[self._place][1], 4)


def parsed(text: str | None) -> tuple[int, int] | None:
    """`10-20`, or a single step. Raises ConfigError for anything else."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    try:
        found = int(first), int(last or first)
    except ValueError:
        found = 0, -1
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"--steps {text}: expected two steps, 10-20, or one")
    return found
