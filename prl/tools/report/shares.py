"""Who was at work while a run made its steps, as shares of that time, from its events.

Left out are the start, what came after the last update, and of a run that went on all that was before.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prl.base.files import lines_of
from prl.transport import events
from prl.transport.events import Span

BALANCED = 1.25
"""The larger of generation and update bounds a run if it takes so many times as long as the other."""
ORDER = (events.ORCHESTRATOR, events.ENGINE, "teacher", events.EVALUATION, events.TRAINER)
UPDATE = (events.FORWARD, events.OPTIMISER, events.EXPORTING)
Times = list[tuple[float, float]]
"""Disjoint intervals in ascending order, seconds since 1970."""


def read_spans(run_dir: Path, problems: list[str]) -> list[Span]:
    """All spans of a run by their start; lines that cannot be read are left out, and `problems` says so."""
    files = sorted((run_dir / events.FOLDER).glob("[!.]*.jsonl"))
    spans = [span for path in files for span in lines_of(path, Span, problems)]
    return sorted(spans, key=lambda span: (span.start, span.stop))


@dataclass(frozen=True)
class Shares:
    """Activities of each process while a run made its steps, as shares of that time."""

    seconds: float
    did: dict[str, dict[str, float]]
    """Shares by process; its waiting too, the largest share first."""
    bound: str
    """Name of what takes most of the time: `generation-bound`, say."""

    def busy(self, process: str) -> float:
        """The share of the time in which a process was at work."""
        return work_of(self.did.get(process, {}))

    @property
    def sentence(self) -> str:
        """`engine 92 % busy (18 % loading weights), trainer 31 %: generation-bound`."""
        engines = engines_of(self.did)
        busy = sum(map(self.busy, engines)) / max(1, len(engines))
        engine = f"engine {100 * busy:.0f} % busy ({100 * mean_share(self.did, events.LOADING):.0f} % loading weights)"
        return f"{engine}, trainer {100 * self.busy(events.TRAINER):.0f} %: {self.bound}"


def rows(times: Shares) -> list[tuple[str, float, str, str]]:
    """Each process with its share at work, with what, and what else it did."""
    found = []
    for name, did in times.did.items():
        shown = {what: f"{what} {100 * share:.0f} %" for what, share in did.items() if share >= 0.005}
        work = ", ".join(text for what, text in shown.items() if is_work(what))
        rest = ", ".join(text for what, text in shown.items() if not is_work(what))
        found.append((name, times.busy(name), work, rest))
    return found


def shares(spans: Sequence[Span]) -> Shares | None:
    """Who was at work while the steps were made; None where none was made."""
    spans = latest(spans)
    updates = [span.stop for span in spans if span.process == events.TRAINER and span.what in UPDATE]
    starts = [span.start for span in spans if span.process == events.ORCHESTRATOR and span.step > spans[0].step]
    if not updates or not starts or min(starts) >= max(updates):
        return None
    first, last = min(starts), max(updates)
    whole = last - first
    did: dict[str, dict[str, float]] = {name: defaultdict(float) for name in processes(spans)}
    for span in spans:
        did[span.process][span.what] += within(span.start, span.stop, first, last) / whole
    at_work = union(
        [(span.start, span.stop) for span in spans if is_work(span.what) and span.process != events.ORCHESTRATOR]
    )
    nobody = 1 - sum(within(start, stop, first, last) for start, stop in at_work) / whole
    shares_of = {
        name: dict(sorted(own.items(), key=lambda item: -item[1])) for name, own in did.items() if any(own.values())
    }
    return Shares(whole, shares_of, bound_of(shares_of, nobody))


def bound_of(did: dict[str, dict[str, float]], nobody: float) -> str:
    """Return what takes the largest share of the time; `nobody`: in which none but the orchestrator was at work."""
    evaluating = work_of(did.get(events.EVALUATION, {}))
    generation = max(0.0, mean_share(did, events.GENERATING) - evaluating)  # an evaluation generates, too
    update = work_of(did.get(events.TRAINER, {}))
    own = min(nobody, work_of(did.get(events.ORCHESTRATOR, {})))
    took = {
        "generation-bound": generation,
        "update-bound": update,
        "bound by loading weights": mean_share(did, events.LOADING),
        "bound by the evaluation": evaluating,
        "bound by the orchestrator": own,
        "bound by tools, graders and frozen models": nobody - own,
    }
    most = max(took, key=lambda word: took[word])
    close = max(generation, update) < BALANCED * min(generation, update)
    return "generation and update balanced" if close and took[most] in (generation, update) else most


def latest(spans: Sequence[Span]) -> list[Span]:
    """The spans, by their start, of the latest process that the run was."""
    begun = [span.start for span in spans if span.process == events.ORCHESTRATOR and span.what == events.PREPARING]
    return [span for span in spans if not begun or span.start >= begun[-1]]


def union(times: Times) -> Times:
    """All that is in any of the intervals."""
    disjoint: Times = []
    for start, stop in sorted(times):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(stop, disjoint[-1][1]))
        elif stop > start:
            disjoint.append((start, stop))
    return disjoint


def within(start: float, stop: float, first: float, last: float) -> float:
    """Seconds from `start` to `stop` that are between `first` and `last`."""
    return max(0.0, min(last, stop) - max(first, start))


def is_work(what: str) -> bool:
    """Return whether a process that does this is at work."""
    return not what.startswith(events.WAITING)


def work_of(own: dict[str, float]) -> float:
    """The share of the time in which a process that did this was at work."""
    return sum(share for what, share in own.items() if is_work(what))


def engines_of(did: dict[str, dict[str, float]]) -> list[str]:
    """The names of the policy's engines: `engine`, or `engine 1`, `engine 2`, …"""
    return [name for name in did if name.split(" ")[0] == events.ENGINE]


def mean_share(did: dict[str, dict[str, float]], what: str) -> float:
    """The mean share of the engines in which they do this."""
    engines = engines_of(did)
    return sum(did[name].get(what, 0.0) for name in engines) / max(1, len(engines))


def processes(spans: Sequence[Span]) -> list[str]:
    """The names of the processes, in the order in which they are shown."""
    names = {span.process for span in spans}
    return sorted(names, key=lambda name: (*[not name.startswith(first) for first in ORDER], name))
