"""A summary as tables of text, which the terminal, Markdown and HTML show alike."""

import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path

import pandas as pd

from prl.base.text import safe
from prl.tools import line_of
from prl.tools.report.comparison import LISTED, Comparison
from prl.tools.report.effects import several
from prl.tools.report.html import TEMPLATES
from prl.tools.report.runs import COMPLETED, Run
from prl.tools.report.statistics import FEW, ROUNDING, half_interval
from prl.tools.report.summary import COLUMNS, TO_THRESHOLD, Summary
from prl.tools.report.variants import ABSENT, interval, number, seed_of
from prl.tools.sweep.metric import source_of

PAGE = "report.html"
"""A run's own page, in its directory."""
SHOWN = 2
"""Metrics of which the table of jobs has the final value."""
DARKEST = 5
"""Shade of the best cell of a table of two keys."""
OWN = str(Path(__file__).parents[3]) + os.sep
HOME = str(Path.home()) + os.sep
"""A table does not say whose home it is, nor where prl is installed (`OWN`)."""
METHOD = (TEMPLATES / "method.txt").read_text(encoding="utf-8").strip()
"""Text that says how to read a summary."""


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
    first: bool = False
    """It belongs to the verdict."""
    shades: list[list[int]] = field(default_factory=list)
    """For each cell how dark it is on a page, from 0 to `DARKEST`."""


def tables(summary: Summary) -> list[Table]:
    """Return the tables of a summary: what is compared, each metric, what differs, and the jobs."""
    measured = [_measured(summary, metric) for metric in summary.metrics]
    labels = [summary.variants.label(values) for values in summary.variants.members]
    compared = summary.variants.differences.items() if len(labels) <= LISTED else ()
    rows = [[key, *(value.removeprefix(OWN).replace(HOME, "~/") for value in values)] for key, values in compared]
    differs = [Table(title="What differs", head=["config key", *labels], rows=rows)] if rows else []
    ranked = [] if summary.comparison.values.empty else [_compared(summary)]
    grids = [(start, part) for start, part in summary.comparison.parts.items() if part.effects]
    return [*starmap(_of_keys, grids), *starmap(_heat, grids), *ranked, *measured, *differs, _jobs(summary)]


def names(runs: list[Run]) -> list[str]:
    """Paths of the runs from the folder they have in common."""
    common = os.path.commonpath([run.dir.parent for run in runs])
    return [os.path.relpath(run.dir, common) for run in runs]


def statuses(runs: list[Run]) -> str:
    """`2 completed, 1 crashed`."""
    counts = Counter(run.status for run in runs)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))


def markdown(table: Table) -> str:
    """The table in Markdown."""
    rule = ["---:" if head in table.numbers else "---" for head in table.head]
    rows = [[escaped(cell) for cell in row] for row in [table.head, *table.rows]]
    lines = ["| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]]]
    return f"## {escaped(table.title)}\n\n" + "\n".join(lines) + "\n"


def _compared(summary: Summary) -> Table:
    """The variants by what they are compared by, best first among those with the same envs."""
    of_label = {summary.variants.label(values): values for values in summary.variants.members}
    found = summary.comparison
    rows = [[*of_label[label], str(column.count()), spread(column)] for label, column in found.values.items()]
    head = [*summary.variants.heads, "seeds", found.metric]
    title = "Best first, envs by envs" if len(found.parts) > 1 else "Best first"
    return Table(title=title, head=head, rows=rows, numbers=frozenset(head[-2:]), first=True)


def _of_keys(start: str, part: Comparison) -> Table:
    """The effect of each key of a grid: its values less the best one, pair by pair."""
    rows = []
    for effect in part.effects:
        best = effect.ranked[0]
        for value, column in effect.runs.items():
            less = (column - effect.runs[best]).dropna()
            apart = f"{'-' if less.mean() < -ROUNDING else '+'}{interval(abs(less.mean()), half_interval(less))}"
            shown = [ABSENT, ABSENT] if value == best or less.empty else [apart, str(len(less))]
            rows.append([effect.key, str(value), str(column.count()), number(column.mean()), *shown])
    head = ["key", "value", "runs", part.metric, "less the best, all else equal", "pairs"]
    return Table(title=f"{start}Effect of each key", head=head, rows=rows, numbers=frozenset(head[2:]), first=True)


def _heat(start: str, part: Comparison) -> Table:
    """The two keys with the largest effects: the mean over the others and the seeds, and its runs if not all are there.

    The best cell is the darkest.
    """
    across, down = part.effects[:2]
    cells = across.runs.groupby(level=f"key {part.keys.index(down.key)}")
    means, counts = cells.mean(), cells.count()
    fewer = (counts < counts.max(axis=None)) & (counts > 0)
    texts = means.map(number) + counts.map(" ({})".format).where(fewer, "")
    # The better the darker, whether more or less of the metric is better.
    ranks = part.sign * means
    above = ranks - ranks.min(axis=None)
    shades = (DARKEST * above / (above.max(axis=None) or 1)).fillna(0).round().astype(int)
    title, head = f"{start}{part.metric} by {down.key} and {across.key}", [f"{down.key}, {across.key}:", *texts]
    rows = [[str(value), *texts.loc[value]] for value in down.runs]
    dark = [[0, *shades.loc[value]] for value in down.runs]
    return Table(title=title, head=head, rows=rows, numbers=frozenset(texts), first=True, shades=dark)


def _measured(summary: Summary, metric: str) -> Table:
    shown = summary.table.columns[len(COLUMNS) :]
    heads = [f"{name} to {number(summary.threshold or 0.0)}" if name in TO_THRESHOLD else name for name in shown]
    done = summary.table[(summary.table["metric"] == metric) & (summary.table["status"] == COMPLETED)]
    rows = []
    for values, runs in summary.variants.members.items():
        completed = done[done["variant"] == summary.variants.label(values)]
        ended = str(len(runs)) if len(completed) == len(runs) else statuses(runs)
        distinct = completed["seed"].nunique()
        if distinct < len(completed):
            ended += f" ({several(distinct, 'seed')})"
        source = source_of(runs[0].config, metric)
        if source:
            ended += f", rewards of {source}"
        rows.append([*values, ended, *(_cell(completed, name) for name in shown)])
    head = [*summary.variants.heads, "runs", *heads]
    return Table(title=metric, head=head, rows=rows, numbers=frozenset(heads))


def _cell(completed: pd.DataFrame, name: str) -> str:
    """A statistic over seeds, and how many of the completed runs have it where that is not all."""
    count, runs = completed[name].count(), len(completed)
    if not completed["final"].count():
        return ABSENT
    of = "" if count == runs else f" ({count} of {runs})"
    return f"{spread(completed.groupby('seed')[name].mean())}{of}" if count else f"0 of {runs}"


def spread(values: pd.Series) -> str:
    """`mean ± half the interval` over seeds; of fewer than `FEW`, `mean (lowest to highest)`; of one, its value."""
    count, mean = values.count(), number(values.mean())
    if count < FEW:
        return mean if count < 2 else f"{mean} ({number(values.min())} to {number(values.max())})"
    return interval(values.mean(), half_interval(values))


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
            line_of(run.result.error) or run.result.ended_because or "; ".join(run.problems[:1]),
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


def escaped(text: str) -> str:
    """Text for a line or a cell of Markdown, in which nothing of it is markup: no image, link, tag, or emphasis."""
    line = safe(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"[\\`*~|\[\]]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", line)
