"""The runs below the watched folders, each with what a list says of it: read without its metrics."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from prl.base.errors import ConfigError
from prl.base.files import lines_in
from prl.base.metric_names import SAMPLED
from prl.base.text import safe
from prl.runs.owner import is_owned
from prl.runs.result import RunResult
from prl.runs.run_dir import RUN_FILES
from prl.tools import line_of
from prl.tools.report.html import rounded
from prl.tools.report.runs import find_runs, json_of, result_of, resumes_of
from prl.tools.sweep.metric import source_of

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
    """The mean of the last step; None where the policy did not sample its rollouts."""
    remarks: list[str]
    """Where it went on, which metrics are not finite, its error."""


def find(folders: Sequence[Path]) -> dict[str, Path]:
    """The runs among and below some folders by name, the one that began last first.

    A name is the path from the folder; of two that have the same the second is known by its whole path.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        try:
            paths = find_runs([folder])
        except ConfigError:  # there is none yet
            continue
        for path in sorted(paths, key=lambda path: -changed(path / "config.yaml")):
            name = safe(str(path.relative_to(folder.parent if path == folder else folder)))
            found[name if name not in found else safe(str(path))] = path
    return found


def entries(runs: Mapping[str, Path]) -> list[Entry]:
    """The list of runs. Only what has changed is read again."""
    files = (*RUN_FILES, "resumes.jsonl")
    return [
        _entry(name, path, tuple(changed(path / file) for file in files), _is_alive(path))
        for name, path in runs.items()
    ]


def _is_alive(path: Path) -> bool:
    """Return whether a process has the run. One that has ended is not asked: a lock takes longer than all else."""
    return not _has_ended(path, changed(path / "result.json")) and is_owned(path)


@functools.lru_cache(10_000)
def _has_ended(path: Path, changed: int) -> bool:
    """Return whether a run has written how it ended; `changed` tells when that is to be read again."""
    result = json_of(path / "result.json", RunResult, [])
    return result is not None and result.has_ended


def changed(path: Path) -> int:
    """When a file was last written [ns]; 0 where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(10_000)
def _entry(name: str, path: Path, changed: tuple[int, ...], alive: bool) -> Entry:
    """Read what the list says of a run; `changed` and `alive` tell when that is to be done again."""
    result, last = result_of(path, []), _last_line(path / "metrics.jsonl")
    config = _text(path / "config.yaml")
    # A pattern, since to parse YAML takes a hundred times as long.
    steps = re.search(rb"^max_steps: (\d{1,12})$", config, re.MULTILINE)
    broken = [key for key, value in last.items() if value is None]
    remarks = [*_history(path), line_of(result.error), result.ended_because or ""]
    remarks += [f"not finite: {', '.join(broken[:3])}{', …' * (len(broken) > 3)}"] if broken else []
    return Entry(
        name=name,
        status=result.status,
        step=max(result.steps, int(last.get("step") or 0)),
        max_steps=int(steps[1]) if steps else None,
        reward=rounded(last.get(SAMPLED, result.metrics.get(SAMPLED))) if _samples(config) else None,
        remarks=[safe(remark[:REMARK]) for remark in remarks if remark],
    )


@functools.lru_cache(200)
def _samples(config: bytes) -> bool:
    """Return whether the policy samples the rollouts that the rewards in training are of."""
    if not re.search(rb"^ +source:(?! policy$)", config, re.MULTILINE):
        return True
    try:  # without OmegaConf, which would take seconds for aliases of aliases
        return not source_of(yaml.CSafeLoader(config).get_single_data(), SAMPLED)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):  # its page says what the file is
        return True


def _history(path: Path) -> list[str]:
    """The times that a run went on, and the run that it forked."""
    return [
        f"forked from {resume.source.name}, step {resume.step}"
        if resume.source
        else f"resumed after step {resume.step}"
        for resume in resumes_of(path, [])
    ]


def _last_line(path: Path) -> dict[str, float | None]:
    """The last whole line of a file of metrics; empty where none can be read."""
    lines, _ = lines_in(_text(path, TAIL), dict[str, float | None])
    return lines[-1] if lines else {}


def _text(path: Path, size: int | None = None) -> bytes:
    """A file's content, or the end of it; empty for one that cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size) if size else 0)
            return file.read()
    except OSError:
        return b""
