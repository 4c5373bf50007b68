"""A summary as tables of text, which the terminal, Markdown and HTML show alike."""

import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from prl.monitors.text import safe
from prl.tools import line_of
from prl.tools.report.runs import Run
from prl.tools.report.statistics import LEVEL
from prl.tools.report.summary import COMPLETED, LAST, TO_THRESHOLD, Summary
from prl.tools.report.variants import ABSENT, seed_of

PAGE = "report.html"
"""A run's own page, in its directory."""
ROUNDING = 1e-12
"""A half interval below this share of its mean comes of rounding: the seeds are equal."""
SHOWN = 2
"""Metrics of which the table of jobs has the final value."""
METHOD = (
    "Means over the seeds of a variant's completed runs (runs of one seed count as their mean), "
    f"± half the {LEVEL:.0%} t interval over seeds. final: the last value of an evaluation, else the mean of the last "
    f"{LAST} steps that have one. to …: until the first value that is at least this: the step, the tokens sampled, the "
    'seconds since step 0. "1 of 2": one of two completed runs reached it, or has the metric.'
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text."""

    title: str
    head: list[str]
    rows: list[list[str]]
    numbers: frozenset[str] = frozenset()
    """Columns, by their heads, that are aligned to the right."""
    links: list[Path | None] = field(default_factory=list)
    """For each row the file that its first cell is a link to."""


def tables(summary: Summary) -> list[Table]:
    """One for each metric, then what differs, then the jobs, with their variants where their names do not say them."""
    measured = [_measured(summary, metric) for metric in summary.metrics]
    labels = [summary.variants.label(values) for values in summary.variants.members]
    rows = [[key, *values] for key, values in summary.variants.differences.items()]
    differs = [Table(title="What differs", head=["config key", *labels], rows=rows)] if rows else []
    return [*measured, *differs, _jobs(summary)]


def names(runs: list[Run]) -> list[str]:
    """Paths of the runs from the folder they have in common."""
    common = os.path.commonpath([run.dir.parent for run in runs])
    return [os.path.relpath(run.dir, common) for run in runs]


def statuses(runs: list[Run]) -> str:
    """`2 completed, 1 crashed`."""
    counts = Counter(run.status for run in runs)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))


def number(value: float) -> str:
    """A number in at least three digits, or a dash for NaN."""
    if math.isnan(value):
        return ABSENT
    if value == round(value) and abs(value) >= 1:
        return f"{value:,.0f}"
    if 0 < abs(value) < 0.01:
        return f"{value:.3g}"
    return f"{value:,.{3 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def markdown(table: Table) -> str:
    """The table in Markdown."""
    rule = ["---:" if head in table.numbers else "---" for head in table.head]
    rows = [[escaped(cell) for cell in row] for row in [table.head, *table.rows]]
    lines = ["| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]]]
    return f"## {escaped(table.title)}\n\n" + "\n".join(lines) + "\n"


def _measured(summary: Summary, metric: str) -> Table:
    shown = summary.statistics
    heads = [f"{name} to {number(summary.threshold or 0.0)}" if name in TO_THRESHOLD else name for name in shown]
    grouped, rows = summary.grouped(metric), []
    for values, runs in summary.variants.members.items():
        row = grouped.loc[summary.variants.label(values)]
        seeds = [seed_of(run) for run in runs if run.status == COMPLETED]
        ended = str(len(runs)) if len(seeds) == len(runs) else statuses(runs)
        if (distinct := len(set(seeds))) < len(seeds):
            ended += f" ({distinct} seed{'s' * (distinct != 1)})"
        rows.append([*values, ended, *(_cell(row, name, len(seeds)) for name in shown)])
    head = [*summary.variants.heads, "runs", *heads]
    return Table(title=metric, head=head, rows=rows, numbers=frozenset(heads))


def _cell(row: pd.Series, name: str, runs: int) -> str:
    """`mean ± half`, and how many of the completed runs have it where that is not all."""
    count = row["count", name]
    if not row["count", "final"] > 0:
        return ABSENT
    mean, half = row["mean", name], row["half", name]
    half = 0.0 if half < ROUNDING * abs(mean) else half
    text = number(mean) + ("" if math.isnan(half) else f" ± {number(half)}")
    if count == runs:
        return text
    return f"{text} ({count:.0f} of {runs})" if count else f"0 of {runs}"


def _jobs(summary: Summary) -> Table:
    members = summary.variants.members.items()
    labels = {run.dir: summary.variants.label(values) for values, runs in members for run in runs}
    finals = summary.table.set_index(["run", "metric"])["final"]
    metrics = summary.metrics[:SHOWN]
    rows = [
        [
            name,
            labels.get(run.dir, ABSENT),
            seed_of(run),
            run.status,
            str(run.result.steps),
            number(run.result.seconds) if run.result.seconds else ABSENT,
            *(number(finals.get((str(run.dir), metric), math.nan)) for metric in metrics),
            _remark(run),
        ]
        for run, name in zip(summary.runs, names(summary.runs), strict=True)
    ]
    pages = [run.dir / PAGE for run in summary.runs]
    return Table(
        title="Jobs",
        head=["run", "variant", "seed", "status", "steps", "seconds", *metrics, "error or remark"],
        rows=rows,
        numbers=frozenset({"steps", "seconds", *metrics}),
        links=[page if page.exists() else None for page in pages],
    )


def _remark(run: Run) -> str:
    """Why it ended, or what could not be read of it."""
    return line_of(run.result.error) or run.result.ended_because or "; ".join(run.problems[:1])


def escaped(text: str) -> str:
    """Text for a line or a cell of Markdown, in which nothing of it is markup: no image, link, tag, or emphasis."""
    line = safe(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"[\\`*~|\[\]]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", line)
