"""Who was at work when, and who waited for whom: shares of the time in which a run made its steps, from its events.

Left out are the start, the time between two processes of a run that went on, and what came after the last update.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

import msgspec

from prl.errors import UNREADABLE
from prl.report.runs import content
from prl.wire.events import (
    ENGINE,
    EVALUATION,
    EXPORTING,
    FOLDER,
    FORWARD,
    GENERATING,
    LOADING,
    MODEL,
    OPTIMISER,
    ORCHESTRATOR,
    PREPARING,
    TRAINER,
    WAITING,
    Span,
)

BALANCED = 1.25
"""The larger of generation and update bounds a run if it takes so many times as long as the other."""
UPDATE = (FORWARD, OPTIMISER, EXPORTING)
OWN = {
    ENGINE: ("generation", "loading weights"),
    TRAINER: ("the trainer",),
    ORCHESTRATOR: ("the orchestrator",),
}
"""What a process does itself of what others wait for."""
OTHERS_WORK = "tools, graders and frozen models"
"""What bounds a run where nothing that records is at work."""
UNRECORDED = "nothing recorded"
"""What a process waits for meanwhile: those of `OTHERS_WORK`, or what passes between processes."""
Times = list[tuple[float, float]]
"""Disjoint intervals in ascending order, seconds since 1970."""


def read_spans(run_dir: Path, problems: list[str], *, steps: int = 0) -> list[Span]:
    """All spans of a run by their start; what cannot be read is left out, and `problems` says so.

    It also says where a file ends before the step `steps`, which the run has made; not of a rank or an engine that a
    resumed run no longer has.
    """
    decoder, found, ends = msgspec.json.Decoder(Span), list[Span](), dict[Path, tuple[int, float]]()
    for path in sorted((run_dir / FOLDER).glob("[!.]*.jsonl")):
        lines, whole = content(path, problems).splitlines(), list[Span]()
        for line in lines:
            with contextlib.suppress(*UNREADABLE):
                whole.append(decoder.decode(line))
        whole = [span for span in whole if 0 <= span.start <= span.stop and isfinite(span.stop)]
        if lost := len(lines) - len(whole):
            problems.append(f"{path}: {lost} of {len(lines)} lines cannot be read")
        elif whole:
            ends[path] = max(span.step for span in whole), max(span.stop for span in whole)
        found += whole
    began = max((span.start for span in found if span.what == PREPARING), default=0.0)
    for path, (step, stop) in ends.items():
        if step < steps and stop > began:
            problems.append(f"{path}: it ends with step {step}, and the run made {steps}")
    return sorted(found, key=lambda span: (span.start, span.stop))


# --- arithmetic of intervals ------------------------------------------------------------------------------------------


def union(times: Iterable[tuple[float, float]]) -> Times:
    """All that is in any of the intervals."""
    found: Times = []
    for start, stop in sorted(times):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif stop > start:
            found.append((start, stop))
    return found


def both(one: Times, other: Times) -> Times:
    """All that is in both."""
    found: Times = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            found.append((start, stop))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: Times, other: Times) -> Times:
    """All of one that is not in the other."""
    edges = [-inf, *(edge for interval in other for edge in interval), inf]
    return both(one, [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)])


def seconds(times: Times) -> float:
    """How long they are together."""
    return sum(stop - start for start, stop in times)


# --- what a run did ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaneShares:
    """What one process did, as shares of the time."""

    process: str
    did: dict[str, float]
    """Its work, the largest share first."""
    waited: dict[str, float]
    """The rest, by what was done elsewhere meanwhile, the largest share first."""

    @property
    def busy(self) -> float:
        return sum(self.did.values())


@dataclass(frozen=True)
class Overlap:
    """Shares of the time in which the steps of a run were made."""

    seconds: float
    lanes: list[LaneShares]
    bound: str
    """generation-bound, say."""
    engines: float
    """Of the engines, the mean share of the time at work."""
    loading: float
    """What of that was loading weights, in which nothing is generated."""
    trainer: float

    @property
    def sentence(self) -> str:
        """`engine 92 % busy (18 % loading weights), trainer 31 %: generation-bound`."""
        engine = f"engine {100 * self.engines:.0f} % busy ({100 * self.loading:.0f} % loading weights)"
        return f"{engine}, trainer {100 * self.trainer:.0f} %: {self.bound}"


def lanes_of(spans: Sequence[Span]) -> list[str]:
    """The names of the lanes, in the order in which they are shown."""
    order = (ORCHESTRATOR, ENGINE, "teacher", EVALUATION, TRAINER)
    names = {span.process for span in spans}
    return sorted(names, key=lambda name: (*[not name.startswith(each) for each in order], name))


def windows(spans: Sequence[Span], steps: tuple[int, int] | None = None) -> Times:
    """When the steps were made: of each process that the run was, from the first batch begun to the last update.

    With `steps`, while the trainer was about these: from the end of the one before to the end of the last.
    """
    trained = [span for span in spans if span.process == TRAINER]
    if steps is not None:
        asked = [span for span in trained if steps[0] <= span.step <= steps[1] and span.what != MODEL]
        limits = union([(min(span.start for span in asked), max(span.stop for span in asked))] if asked else [])
        return both(windows(spans), limits)
    found: list[tuple[float, float]] = []
    first: int | None = None
    for span in sorted(spans, key=lambda span: span.start):
        if span.process == ORCHESTRATOR and (first is None or span.what == PREPARING):
            first = span.step
            found.append((inf, -inf))
        elif found and span.process == ORCHESTRATOR and first is not None and span.step > first:
            found[-1] = min(found[-1][0], span.start), found[-1][1]
        elif found and span.process == TRAINER and span.what in UPDATE:
            found[-1] = found[-1][0], max(found[-1][1], span.stop)
    return union(found)


def overlap(spans: Sequence[Span], steps: tuple[int, int] | None = None) -> Overlap | None:
    """Who was at work while the steps were made, or those from `steps[0]` to `steps[1]`; None where none was made."""
    times = windows(spans, steps)
    if not times:
        return None
    did = _by_process(spans, times)
    work = {name: union(t for what, found in of.items() if is_work(what) for t in found) for name, of in did.items()}
    engines = [name for name in did if name.split(" ")[0] == ENGINE]
    meanwhile = {
        "the evaluation": work.get(EVALUATION, []),
        "generation": union(t for name in engines for t in did[name].get(GENERATING, [])),
        "loading weights": union(t for name in engines for t in did[name].get(LOADING, [])),
        "the trainer": work.get(TRAINER, []),
        "the orchestrator": work.get(ORCHESTRATOR, []),
    }
    whole = seconds(times)
    lanes = []
    for name in lanes_of(spans):
        if name == EVALUATION or name not in did:
            continue
        others = {what: found for what, found in meanwhile.items() if what not in OWN.get(name.split(" ")[0], ())}
        if name in engines:
            others["other engines"] = union(t for other in engines if other != name for t in work[other])
        working = {what: seconds(found) / whole for what, found in did[name].items() if is_work(what)}
        waited = {what: seconds(found) / whole for what, found in _blamed(without(times, work[name]), others).items()}
        lanes.append(LaneShares(name, _sorted(working), _sorted(waited)))
    of_engines = [lane for lane in lanes if lane.process in engines]
    busy = sum(lane.busy for lane in of_engines) / max(1, len(of_engines))
    loading = sum(lane.did.get(LOADING, 0.0) for lane in of_engines) / max(1, len(of_engines))
    trainer = sum(lane.busy for lane in lanes if lane.process == TRAINER)
    return Overlap(whole, lanes, _bound(did, times, meanwhile, engines), busy, loading, trainer)


def is_work(what: str) -> bool:
    return not what.startswith(WAITING)


def _by_process(spans: Sequence[Span], times: Times) -> dict[str, dict[str, Times]]:
    """When each process did what, within `times`."""
    did: dict[str, dict[str, Times]] = {}
    for span in spans:
        did.setdefault(span.process, {}).setdefault(span.what, []).append((span.start, span.stop))
    return {name: {what: both(union(found), times) for what, found in of.items()} for name, of in did.items()}


def _blamed(idle: Times, meanwhile: Mapping[str, Times]) -> dict[str, Times]:
    """The parts of `idle` by what was done elsewhere, the first of it that was."""
    found = {}
    for what, times in meanwhile.items():
        found[what], idle = both(idle, times), without(idle, times)
    return found | {UNRECORDED: idle}


def _bound(
    did: Mapping[str, Mapping[str, Times]], times: Times, meanwhile: Mapping[str, Times], engines: Sequence[str]
) -> str:
    """What takes the largest share of the time."""
    evaluating, updating = meanwhile["the evaluation"], meanwhile["the trainer"]

    def of_engines(what: str) -> float:
        parts = (seconds(without(did[name].get(what, []), evaluating)) for name in engines)
        return sum(parts) / max(1, len(engines))

    idle = times
    for at_work in ("the evaluation", "generation", "loading weights", "the trainer"):
        idle = without(idle, meanwhile[at_work])
    own = both(idle, meanwhile["the orchestrator"])
    generation, update = of_engines(GENERATING), seconds(updating)
    took = {
        "generation-bound": generation,
        "update-bound": update,
        "bound by loading weights": of_engines(LOADING),
        "bound by the evaluation": seconds(evaluating),
        "bound by the orchestrator": seconds(own),
        f"bound by {OTHERS_WORK}": seconds(idle) - seconds(own),
    }
    most = max(took, key=lambda word: took[word])
    close = max(generation, update) < BALANCED * min(generation, update)
    return "generation and update balanced" if close and took[most] in (generation, update) else most


def _sorted(shares: Mapping[str, float]) -> dict[str, float]:
    return {what: share for what, share in sorted(shares.items(), key=lambda item: -item[1]) if share > 0}
