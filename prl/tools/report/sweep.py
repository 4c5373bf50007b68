"""A summary of several runs, written from their directories alone.

`write_summary` is what `prl report <sweep>` does, and what a sweep does when its last job ends.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from prl.base.files import write_atomically
from prl.base.text import safe
from prl.tools.report import try_to_write
from prl.tools.report.html import render
from prl.tools.report.plots import Panel, pictures, with_margin
from prl.tools.report.runs import COMPLETED, Run, find_runs, json_of, read_run
from prl.tools.report.statistics import FEW, band, curve
from prl.tools.report.summary import Summary, summarise
from prl.tools.report.tables import METHOD, PAGE, escaped, markdown, names, statuses, tables
from prl.tools.report.variants import in_order, is_number, seed_of, short_paths
from prl.tools.sweep.metric import source_of

WIDE = 2.5
"""Ratio of the largest to the smallest number of a key, below which its axis is linear."""
TICKS = 6
"""Numbers of a key are named one by one on its axis where so many of them would have room."""
STUDIES = ("study.db", "optimization_results.yaml")
"""Files that an optimiser leaves in the directory of a sweep."""


def write_summary(
    *folders: str | Path, out: str | Path | None = None, metrics: Sequence[str] = (), threshold: float | None = None
) -> Summary:
    """Add up the runs among and below `folders` into `summary.{md,csv,html}` and `curves.{png,pdf,svg}`.

    Runs without a page of their own get one, and those that still run a new one, for the summary to link to.

    Args:
        folders: a sweep, say.
        out: folder to write into; None = the first of `folders`.
        metrics, threshold: as `summarise` takes them.

    Raises:
        ConfigError: there is no run, or none with a metric that was asked for.
        OSError: the files cannot be written.
    """
    runs = [read_run(folder) for folder in find_runs(folders)]
    summary = summarise(runs, metrics, threshold, named=len(folders) > 1)
    out = Path(out or folders[0]).absolute()
    for run in summary.runs:
        if run.status == "running" or not (run.dir / PAGE).exists():
            try_to_write(run.dir)
    parts, charts, heading = tables(summary), panels(summary), title(summary, folders)
    points = searches(summary) + scatters(summary)
    picture = ["![curves](curves.png)\n"] if charts else []
    verdict = [f"## Verdict: {escaped(summary.comparison.metric)}\n"]
    verdict += [f"- {escaped(sentence)}" for sentence in summary.comparison.verdict]
    text = "\n".join([f"# {escaped(heading)}\n", *verdict, "", *picture, *map(markdown, parts), METHOD, ""])
    html = render(
        "summary.html.j2",
        title=heading,
        method=METHOD,
        tables=[(table, [link and os.path.relpath(link, out) for link in table.links]) for table in parts],
        panels=charts,
        comparison=summary.comparison,
        points=points,
    )
    write_atomically(out / "summary.md", text.encode())
    paths = dict(zip((str(run.dir) for run in summary.runs), names(summary.runs), strict=True))
    table = summary.table.assign(run=summary.table["run"].map(paths))
    write_atomically(out / "summary.csv", safe(table.to_csv(index=False)).encode())
    write_atomically(out / "summary.html", html.encode())
    for name, content in pictures([*charts, *points]).items() if charts else ():
        write_atomically(out / name, content)
    return summary


def title(summary: Summary, folders: Sequence[str | Path]) -> str:
    """`demo: 4 runs (3 completed, 1 crashed), 2 variants`; first the folders that were asked for."""
    folder = ", ".join(short_paths([Path(os.path.abspath(folder)) for folder in folders]))
    runs, variants = len(summary.runs), len(summary.variants.members)
    ended = f"{runs} run{'s' * (runs != 1)} ({statuses(summary.runs)})"
    return f"{folder}: {ended}, {variants} variant{'s' * (variants != 1)}"


def panels(summary: Summary) -> list[Panel]:
    """A chart a metric: the mean of each variant's completed runs with its interval; each other run by itself.

    Of fewer than `FEW` seeds the band is their range, and each seed is drawn. Training rewards that are not the
    policy's are left out.
    """
    charts = []
    for metric in summary.metrics:
        curves = {run.dir: curve(run.whole, metric) for run in summary.runs if not source_of(run.config, metric)}
        if not any(map(len, curves.values())):
            continue
        series, bands, thin, single = {}, {}, {}, {}
        for values, runs in summary.variants.members.items():
            label = summary.variants.label(values)
            runs = [run for run in runs if run.dir in curves]
            completed = {run.dir: curves[run.dir] for run in runs if run.status == COMPLETED}
            single[label] = [curves[run.dir] for run in runs if run.status != COMPLETED]
            seeds = {run.dir: seed_of(run) for run in runs}
            by_seed = pd.DataFrame(completed).sort_index().T.groupby(seeds).mean().T
            interval = band(by_seed)
            series[label] = interval["mean"]
            bands[label] = (interval["low"], interval["high"])
            thin[label] = [by_seed[seed].dropna() for seed in by_seed if 1 < by_seed.shape[1] < FEW]
        ends = with_margin(pd.concat(curves.values()), 0.06)
        charts.append(Panel(title=metric, series=series, bands=bands, thin=thin, single=single, y=ends))
    return charts


def scatters(summary: Summary) -> list[Panel]:
    """A chart for each key that varies: what is compared in each seed, over the key's values."""
    found = summary.comparison.values.unstack().dropna()  # (variant, seed) -> value
    best = found.index.get_level_values(0).isin([part.values.columns[0] for part in summary.comparison.parts.values()])
    charts = []
    for place, key in enumerate(summary.variants.columns if len(found) else []):
        values = [summary.comparison.settings[label][place] for label, _ in found.index]
        order = in_order(of_variant[place] for of_variant in summary.comparison.settings.values())
        named = not all(map(is_number, order))
        numbers = pd.Series(range(len(order)) if named else map(float, order), index=order, dtype=float)
        points = pd.Series(found.to_numpy(), index=[numbers[value] for value in values])
        scale: Any = "log" if not named and _is_log(key, numbers) else "linear"
        places = numbers.map(math.log) if scale == "log" else numbers
        roomy = TICKS * places.diff().min() >= places.max() - places.min()
        ticks = dict(zip(numbers, _short(order), strict=True)) if named or roomy else {}
        title = f"{summary.comparison.metric} by {summary.variants.heads[place]}"
        series = {"others": points[~best], "best": points[best]}
        charts.append(Panel(title=title, series=series, scatter=scale, ticks=ticks))
    return charts


def searches(summary: Summary) -> list[Panel]:
    """The chart of an optimiser's search, none of other runs: the objective of the trials in the order of their starts,
    and the best so far."""
    found, folders = summary.comparison, {run.dir.parent for run in summary.runs}
    studies = [summary.runs[0].dir.parent / name for name in STUDIES]
    if found.values.empty or len(folders) > 1 or not any(map(Path.exists, studies)):
        return []
    members = summary.variants.members.items()
    starts = {summary.variants.label(values): min(map(_start, runs)) for values, runs in members}
    trials = found.values.mean()[sorted(found.values, key=starts.__getitem__)]
    trials.index = range(1, len(trials) + 1)
    best = found.sign * (found.sign * trials).cummax()
    name = f"{found.metric} by trial, and the best so far"
    return [Panel(title=name, series={"": trials}, scatter="linear", line=best)]


def _start(run: Run) -> str:
    """The moment when a run began, which sorts as text; empty where its provenance does not say it."""
    return str((json_of(run.dir / "provenance.json", dict[str, Any], []) or {}).get("started", ""))


def _is_log(key: str, numbers: pd.Series) -> bool:
    """Return whether the axis of a key is logarithmic: its values are rates, or are spaced as rates are."""
    low, middle, high = numbers.min(), numbers.median(), numbers.max()
    geometric = middle**2 < math.sqrt(max(low, 0) * high) * (low + high) / 2  # nearer to that than to the linear mean
    return bool(low > 0 and high >= WIDE * low and (geometric or key.split(".")[-1] == "lr"))


def _short(names: list[str]) -> list[str]:
    """The names on an axis without the beginning that all have: `sft` for `forgetting_sft`, as arms have it."""
    parts = [name.split("_", 1) for name in names]
    return [part[-1] for part in parts] if len({part[0] for part in parts}) == 1 else names
