"""News for a page in the browser: what runs have written since it was asked last."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prl.base.errors import PrlError
from prl.base.files import lines_in
from prl.tools.report.curves import Columns, columns
from prl.tools.report.html import fragment
from prl.tools.report.page import drawn, state
from prl.tools.report.runs import metrics_before, read_run, resumes_of
from prl.tools.watch.listing import Entry, entries, find

log = logging.getLogger(__name__)
RARELY_S = 2.0
"""[s] What takes longer to read than a line is read at most this often, …"""
SHARE = 0.003
"""… and takes at most this share of a core."""
LINES = 20_000
"""Lines of metrics that a page gets at once, of all its runs together: more steps than it has pixels for."""
News = tuple[str, Any]
"""Name and data of an event."""


def read_on(path: Path, at: str, most: int = LINES) -> tuple[str, Columns, bool]:
    """Read the whole lines of metrics behind a place: `<inode>-<offset>`, anything else is the beginning.

    Of more lines than `most` every so-manieth is read, and each that has an evaluation.

    Returns:
        The place behind them, their metrics, and whether the file is another one than before: a run that goes on
        writes its file anew, without the lines behind its checkpoint.
    """
    inode, offset = map(int, at.split("-")) if re.fullmatch(r"\d+-\d+", at) else (0, 0)
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_ino
            # From the byte before: what ended there was a line, or this is another file.
            file.seek(max(0, offset - 1))
            goes_on = found == inode and (offset == 0 or file.read(1) == b"\n")
            start = offset if goes_on else 0
            file.seek(start)
            written = file.read()
    except OSError:  # not there yet, or no longer
        return "", {}, offset > 0
    # Behind the last end of a line somebody is writing.
    whole = written[: written.rfind(b"\n") + 1]
    every = whole.count(b"\n") // most + 1
    # Counted from the end: the newest line is always among them.
    numbered = enumerate(reversed(whole.splitlines(keepends=True)))
    kept = [line for number, line in numbered if number % every == 0 or b'"eval/' in line]
    lines, _ = lines_in(b"".join(reversed(kept)), dict[str, float | None])
    return f"{found}-{start + len(whole)}", columns(lines), not goes_on


class Feed:
    """The news for one page. Whatever it knows is read again where it is lost."""

    def __init__(self, folders: Sequence[Path], chosen: dict[str, str]):
        self.folders = folders
        self.chosen = chosen
        """The runs whose curves the page shows, and the places up to which it has them."""
        self.paths: dict[str, Path] = {}
        self.listed: list[Entry] | None = None
        self.shown: Entry | None = None
        """The only run that is chosen, as it was when the page got its state."""
        self._next: dict[str, float] = {}

    def news(self) -> Iterator[News]:
        """Read what has come: `runs`, `lines` of a run, and the `state` of one that is shown alone."""
        yield from self._rarely("runs", self._runs)
        for name, at in self.chosen.items():
            if name in self.paths:
                path = self.paths[name] / "metrics.jsonl"
                self.chosen[name], found, anew = read_on(path, at, LINES // len(self.chosen))
                if found or anew:
                    lines = {"run": name, "at": self.chosen[name], "anew": anew, "metrics": as_bytes(found)}
                    begins = anew or at.endswith("-0")
                    yield "lines", lines | ({"before": as_bytes(before(self.paths[name], found))} if begins else {})
        if len(self.chosen) == 1:
            yield from self._rarely("state", self._state)

    def _runs(self) -> Sequence[News]:
        self.paths = find(self.folders)
        known = self.listed
        self.listed = entries(self.paths)
        if self.shown and (self.shown.name, self.shown.status) not in [(run.name, run.status) for run in self.listed]:
            self._next.pop("state", None)  # a run's end is shown at once
        return [] if self.listed == known else [("runs", self.listed)]

    def _state(self) -> Sequence[News]:
        [name] = self.chosen
        entry = next((entry for entry in self.listed or () if entry.name == name), None)
        if entry is None or entry == self.shown:
            return []
        self.shown = entry
        return [("state", {"run": name} | state_of(self.paths[name]))]

    def _rarely(self, name: str, read: Callable[[], Sequence[News]]) -> Sequence[News]:
        if time.monotonic() < self._next.get(name, 0.0):
            return []
        began = time.thread_time()  # work, not the wait for a core that a run has
        try:
            return read()
        except (PrlError, OSError):  # the run is just being removed
            return []
        except Exception:  # a file that somebody else has written must not keep the others from being shown
            log.warning("%s cannot be read", name, exc_info=True)
            return []
        finally:
            self._next[name] = time.monotonic() + max(RARELY_S, (time.thread_time() - began) / SHARE)


def before(run_dir: Path, own: Columns) -> Columns:
    """The metrics of the run that a run forked, up to the first of its `own` steps; empty of one that is no fork."""
    firsts = [steps[0] for steps, _ in own.values()]
    return drawn(metrics_before(resumes_of(run_dir, []), int(min(firsts)), [])) if firsts else {}


def as_bytes(metrics: Columns) -> dict[str, msgspec.Raw]:
    """Metrics whose numbers are JSON already: nothing among them has to be made harmless."""
    return {key: msgspec.Raw(msgspec.json.encode(column)) for key, column in metrics.items()}


def state_of(run_dir: Path) -> dict[str, Any]:
    """The fragments of a run's page that change while it goes on, as HTML, and the steps that it compares."""
    run = read_run(run_dir)
    values = state(run)
    parts = {name: fragment(f"{name}.html.j2", **values) for name in ("head", "waits")}
    return {"parts": parts, "compared": values["compared"]}
