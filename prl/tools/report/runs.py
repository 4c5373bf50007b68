"""A run directory read back: finished, running, crashed or refused; nothing in it is instantiated."""

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pandas as pd

from prl.base.errors import ConfigError
from prl.base.files import lines_of
from prl.base.text import in_one_line, natural
from prl.config.run_yaml import yaml_of
from prl.config.suggestions import override_key
from prl.runs.owner import is_owned
from prl.runs.result import RunResult
from prl.runs.run_dir import RUN_FILES, holds_run

T = TypeVar("T")
COMPLETED = "completed"
"""Status of a run that came to its end."""
_content = functools.lru_cache(200)(yaml_of)  # a page that is live reads the same texts again and again
MOVED_ASIDE = re.compile(r"\.(failed|stopped|refused|crashed)-\d+$")
"""End of the name of a directory that a sweep moved aside, to do the job again."""


class Resume(msgspec.Struct):
    """A line of `resumes.jsonl`: the run went on."""

    checkpoint: str
    step: int
    """The step of the checkpoint."""
    changed: dict[str, tuple[Any, Any]] = {}
    """Config key -> its value before, and from then on."""

    @property
    def source(self) -> Path | None:
        """The run that this one forked; None where it went on in its own directory, where checkpoints have no path."""
        return Path(self.checkpoint).parent.parent if os.path.isabs(self.checkpoint) else None


def resumes_of(folder: Path, problems: list[str]) -> list[Resume]:
    """The times that a run went on, the first of a fork among them."""
    return lines_of(folder / "resumes.jsonl", Resume, problems)


class Sweep(msgspec.Struct):
    """The field that is read of `sweep.json`."""

    fixed: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory, as it was read. A file that is missing or cannot be read counts as empty."""

    dir: Path
    """Absolute."""
    config: dict[str, Any]
    """`config.yaml`, nested."""
    overrides: list[str]
    """Overrides that were typed: `.hydra/overrides.yaml`."""
    result: RunResult
    """`result.json`; of a run without one: its status, and the steps it recorded."""
    metrics: pd.DataFrame
    """A row a step, floats; the index is the step, 0 the evaluation before training. NaN: not recorded."""
    problems: list[str]
    """Files that could not be read, and why, each in a line."""
    searched: list[str] = field(default_factory=list)
    """Config keys that the sweep of this job varies."""
    resumes: list[Resume] = field(default_factory=list)
    """The times that it went on, the first of a fork among them."""
    before: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Of a fork the metrics of the run that it began from, up to where it did."""

    @property
    def status(self) -> str:
        """completed, failed, stopped or refused, as `result.json` has it; without one running or crashed."""
        return self.result.status

    @property
    def whole(self) -> pd.DataFrame:
        """The metrics of the run, behind those of the run that it forked."""
        return pd.concat([self.before, self.metrics]) if len(self.before) else self.metrics


def read_run(folder: str | Path, *, with_metrics: bool = True) -> Run:
    """Read a run directory; without metrics, where its config is all that matters, in a tenth of the time.

    Raises ConfigError for a folder that is not one.
    """
    folder = Path(folder).absolute()
    if not holds_run(folder):
        raise ConfigError(f"{folder} is not a run directory: it has none of {', '.join(RUN_FILES)}")
    problems: list[str] = []
    metrics = _metrics(folder / "metrics.jsonl" if with_metrics else folder / "no metrics", problems)
    result = result_of(folder, problems)
    last = int(metrics.index[-1]) if len(metrics) else 0
    # A run that was killed left no result, but its metrics.
    result.steps = max(result.steps, last)
    overrides = _yaml(folder / ".hydra" / "overrides.yaml", list[str], problems) or []
    sweep = json_of(folder.parent / "sweep.json", Sweep, problems)
    resumes = resumes_of(folder, problems)
    of_all = None if sweep is None else sweep.fixed
    # Of a run that is no job of a sweep all that was typed is fixed.
    fixed = {key.lstrip("~") for key in of_all} if of_all is not None else set(map(override_key, overrides))
    return Run(
        dir=folder,
        config=_yaml(folder / "config.yaml", dict[str, Any], problems) or {},
        overrides=overrides,
        searched=[key for key in map(override_key, overrides) if key not in fixed],
        result=result,
        metrics=metrics,
        problems=problems,
        resumes=resumes,
        before=metrics_before(resumes, int(metrics.index[0]), problems) if len(metrics) else metrics,
    )


def metrics_before(resumes: list[Resume], first: int, problems: list[str]) -> pd.DataFrame:
    """The metrics of the run that a fork with these resumes began from, and of those that this came of.

    Args:
        first: the fork's own first step, before which they end.
    """
    found = pd.DataFrame()
    while True:
        sources = [(resume.source, resume.step) for resume in resumes if resume.source is not None]
        if not sources:
            break
        folder, step = sources[0]
        if not _is_there(folder):
            problems.append(f"{folder}, which it forked, cannot be read: curves begin at step {first}")
            break
        resumes = resumes_of(folder, problems)
        metrics = _metrics(folder / "metrics.jsonl", problems).loc[: min(first - 1, step)]
        if not len(metrics):  # else it has earlier steps than the round before
            break
        first = int(metrics.index[0])
        found = pd.concat([metrics, found])
    return found


def result_of(folder: Path, problems: list[str]) -> RunResult:
    """The `result.json` of a run; of one without: running or crashed."""
    result = json_of(folder / "result.json", RunResult, problems)
    if (result is None or not result.has_ended) and is_owned(folder):
        return RunResult(status="running")
    return result or RunResult(status="crashed")


def find_runs(folders: Iterable[str | Path]) -> list[Path]:
    """The run directories among and below `folders`, each once, in the order of their names, 2 before 10.

    What a restart has moved aside (`<job>.failed-1`) is left out, unless it is named itself. Raises ConfigError where
    there is none.
    """
    paths = [Path(folder).absolute() for folder in folders]
    runs = dict.fromkeys(run for path in paths for run in _below(path))
    if not runs:
        raise ConfigError(f"no run in {', '.join(map(str, paths))}: none has one of {', '.join(RUN_FILES)}")
    return list(runs)


def json_of(path: Path, kind: type[T], problems: list[str]) -> T | None:
    return _decoded(path, lambda text: msgspec.json.decode(text, type=kind), problems)


def _below(folder: Path) -> Iterator[Path]:
    if holds_run(folder):
        yield folder
    elif folder.is_dir():
        for path in sorted(folder.iterdir(), key=lambda path: natural(path.name)):
            aside = path.name.startswith(".") or MOVED_ASIDE.search(path.name) or path.is_symlink()
            if not aside and os.access(path, os.R_OK | os.X_OK):  # others' runs are theirs to read
                yield from _below(path)


def _metrics(path: Path, problems: list[str]) -> pd.DataFrame:
    """A frame of the lines; several lines of one step become one, with the last value of each metric."""
    lines = [line for line in lines_of(path, dict[str, float | None], problems) if line.get("step") is not None]
    frame = pd.DataFrame.from_records(lines, columns=None if lines else ["step"]).astype(float)
    frame["step"] = frame["step"].astype(int)
    return frame.groupby("step").last()


def _is_there(folder: Path) -> bool:
    """Return whether a folder is that of a run, which may be somebody else's."""
    try:
        return holds_run(folder)
    except (OSError, ValueError):  # no permission; a name that no folder may have
        return False


def _yaml(path: Path, kind: type[T], problems: list[str]) -> T | None:
    return _decoded(path, lambda text: msgspec.convert(_content(text.decode()), kind), problems)


def _decoded(path: Path, decode: Callable[[bytes], T], problems: list[str]) -> T | None:
    """Return what a file says; None where it is not there, or empty, or cannot be read, which becomes a problem."""
    try:
        return decode(path.read_bytes()) if path.is_file() else None
    except Exception as error:  # of YAML, OmegaConf, msgspec: one file must not keep the others from being read
        problems.append(f"{path} cannot be read: {in_one_line(error)}")
        return None
