"""The runs below the watched folders, each with what a list says of it in a line: read without its metrics."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prl.base.errors import UNREADABLE, ConfigError
from prl.base.metric_names import SAMPLED
from prl.base.text import safe
from prl.runs.run_dir import RUN_FILES
from prl.tools import line_of
from prl.tools.report.html import rounded
from prl.tools.report.runs import find_runs, is_run, resumes, result_of

TAIL = 256 * 1024
"""Bytes at the end of `metrics.jsonl` in which the last line is looked for."""
REMARK = 160
"""Characters of an error in the list."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run in the list."""

    name: str
    status: str
    step: int
    max_steps: int | None
    reward: float | None
    remarks: list[str]
    """Sentences: from where it went on, which metrics are not finite, its error."""


class Listing:
    """The runs among and below some folders."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = [folder.absolute() for folder in folders]
        self._read: dict[Path, tuple[list[int], Entry]] = {}

    def runs(self) -> dict[str, Path]:
        """Name -> run directory, the run that was started last first. A name is the path from its watched folder."""
        found = {}
        for folder in self.folders:
            paths = _found(folder)
            for path in sorted(paths, key=lambda path: -changed(path / "config.yaml")):
                name = safe(str(path.relative_to(folder.parent if path == folder else folder)))
                found[name if name not in found else safe(str(path))] = path
        return found

    def entries(self, runs: dict[str, Path]) -> list[Entry]:
        """The list of `runs`. Only what has changed is read again."""
        return [self._entry(name, path) for name, path in runs.items()]

    def _entry(self, name: str, path: Path) -> Entry:
        before = [changed(path / file) for file in (*RUN_FILES, "resumes.jsonl")]
        read, entry = self._read.get(path, (None, None))
        # Whether a run without a result is alive is in no file.
        if entry is None or read != before or entry.name != name or entry.status in ("running", "crashed"):
            entry = entry_of(name, path)
            self._read[path] = before, entry
        return entry


def entry_of(name: str, path: Path) -> Entry:
    """Read what the list says of a run."""
    result, last = result_of(path, []), last_line(path / "metrics.jsonl")
    broken = [key for key, value in last.items() if value is None]
    remarks = [resume.sentence for resume in resumes(path)]
    if broken:
        remarks.append(f"not finite: {', '.join(broken[:3])}{', …' * (len(broken) > 3)}")
    remarks += filter(None, [line_of(result.error), result.ended_because])
    return Entry(
        name=name,
        status=result.status,
        step=max(result.steps, int(last.get("step") or 0)),
        max_steps=_max_steps(path / "config.yaml"),
        reward=rounded(last.get(SAMPLED, result.metrics.get(SAMPLED))),
        remarks=[safe(remark[:REMARK]) for remark in remarks],
    )


def last_line(path: Path) -> dict[str, float | None]:
    """The last whole line of a file of metrics; empty where there is none that can be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            *lines, _ = file.read().split(b"\n")
        return msgspec.json.decode(lines[-1], type=dict[str, float | None])
    except (OSError, IndexError, *UNREADABLE):
        return {}


def _found(folder: Path) -> list[Path]:
    try:
        return find_runs([folder])
    except (ConfigError, OSError):  # there is none yet, or one is just being removed
        return [folder] if is_run(folder) else []


def changed(path: Path) -> int:
    """When a file was last written [ns]; 0 where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _max_steps(path: Path) -> int | None:
    """The option of a config; a pattern, since to parse YAML takes a hundred times as long."""
    try:
        match = re.search(r"^max_steps: (\d{1,12})$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
