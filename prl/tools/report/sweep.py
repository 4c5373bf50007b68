"""A summary of several runs, written from their directories alone.

`write_summary` is what `prl report <sweep>` does, and what a sweep does when its last job ends.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from prl.base.files import write_atomically
from prl.base.text import safe
from prl.tools.report import try_to_write
from prl.tools.report.html import render
from prl.tools.report.plots import Panel, png, with_margin
from prl.tools.report.runs import COMPLETED, find_runs, read_run
from prl.tools.report.statistics import FEW, band, curve
from prl.tools.report.summary import Summary, summarise
from prl.tools.report.tables import METHOD, PAGE, escaped, markdown, names, statuses, tables
from prl.tools.report.variants import seed_of

LOG_FROM = 20
"""Ratio of the largest to the smallest number of a key, from which on its axis is logarithmic."""


def write_summary(
    *folders: str | Path, out: str | Path | None = None, metrics: Sequence[str] = (), threshold: float | None = None
) -> Summary:
    """Add up the runs among and below `folders` into `summary.md`, `.csv` and `.html` and `curves.png`.

    Runs without a page of their own get one, and those that still run a new one, for the summary to link to.

    Args:
        folders: a sweep, say.
        out: folder to write into; None = the first of `folders`.
        metrics, threshold: as `summarise` takes them.

    Raises:
        ConfigError: there is no run, or none with a metric that was asked for.
        OSError: the files cannot be written.
    """
    summary = summarise([read_run(folder) for folder in find_runs(folders)], metrics, threshold)
    out = Path(out or folders[0]).absolute()
    for run in summary.runs:
        if run.status == "running" or not (run.dir / PAGE).exists():
            try_to_write(run.dir)
    parts, charts, points, heading = tables(summary), panels(summary), scatters(summary), title(summary, folders)
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
    write_atomically(out / "summary.csv", table.to_csv(index=False).encode())
    write_atomically(out / "summary.html", html.encode())
    if charts:
        write_atomically(out / "curves.png", png([*charts, *points]))
    return summary


def title(summary: Summary, folders: Sequence[str | Path]) -> str:
    """`demo: 4 runs (3 completed, 1 crashed), 2 variants`; first the folders that were asked for."""
    folder = ", ".join(os.path.basename(os.path.abspath(folder)) for folder in folders)
    runs, variants = len(summary.runs), len(summary.variants.members)
    ended = f"{runs} run{'s' * (runs != 1)} ({statuses(summary.runs)})"
    return f"{folder}: {ended}, {variants} variant{'s' * (variants != 1)}"


def panels(summary: Summary) -> list[Panel]:
    """A chart a metric: the mean of each variant's completed runs with its interval; each other run by itself.

    Of fewer than `FEW` seeds the band is their range, and each seed is drawn.
    """
    charts = []
    for metric in summary.metrics:
        series, bands, thin, single = {}, {}, {}, {}
        for values, runs in summary.variants.members.items():
            label = summary.variants.label(values)
            completed = {run.dir: curve(run.metrics, metric) for run in runs if run.status == COMPLETED}
            single[label] = [curve(run.metrics, metric) for run in runs if run.status != COMPLETED]
            seeds = {run.dir: seed_of(run) for run in runs}
            by_seed = pd.DataFrame(completed).sort_index().T.groupby(seeds).mean().T
            interval = band(by_seed)
            series[label] = interval["mean"]
            bands[label] = (interval["low"], interval["high"])
            thin[label] = [by_seed[seed].dropna() for seed in by_seed if 1 < by_seed.shape[1] < FEW]
        ends = with_margin(pd.concat([curve(run.metrics, metric) for run in summary.runs]), 0.06)
        charts.append(Panel(title=metric, series=series, bands=bands, thin=thin, single=single, y=ends))
    return charts


def scatters(summary: Summary) -> list[Panel]:
    """A chart for each key that varies: what is compared in each seed, over the key's values."""
    found = summary.comparison.values.unstack().dropna()  # (variant, seed) -> value
    of_label = {summary.variants.label(values): values for values in summary.variants.members}
    charts = []
    for place, head in enumerate(summary.variants.heads if len(found) else []):
        texts = pd.Series([safe(of_label[label][place]).replace("$", r"\$") for label, _ in found.index])
        numbers = pd.to_numeric(texts, errors="coerce")
        parts = texts.str.split("_", n=1).str
        names = parts[-1] if parts[0].nunique() == 1 else texts  # `sft` for `forgetting_sft`, as arms have it
        scale: Any = "log" if numbers.max() >= LOG_FROM * numbers.min() > 0 and not numbers.hasnans else "linear"
        points = pd.Series(found.to_numpy(), index=names if numbers.hasnans else numbers)
        best = found.index.get_level_values(0).isin([labels[0] for labels in summary.comparison.by_envs.values()])
        series = {"others": points[~best], "best": points[best]}
        charts.append(Panel(title=f"{summary.comparison.metric} by {head}", series=series, scatter=scale))
    return charts
