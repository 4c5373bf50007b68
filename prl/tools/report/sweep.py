"""A summary of several runs, written from their directories alone.

`write_summary` is what `prl report <sweep>` does, and what a sweep does when its last job ends.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from prl.tools.report import try_to_write
from prl.tools.report.html import render
from prl.tools.report.plots import Panel, png, with_margin
from prl.tools.report.runs import find_runs, read_run
from prl.tools.report.statistics import band, curve
from prl.tools.report.summary import COMPLETED, Summary, summarise
from prl.tools.report.tables import METHOD, PAGE, escaped, markdown, names, statuses, tables
from prl.tools.report.variants import seed_of
from prl.transport.files import write_atomically


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
    parts, charts, heading = tables(summary), panels(summary), title(summary, folders)
    picture = ["![curves](curves.png)\n"] if charts else []
    text = "\n".join([f"# {escaped(heading)}\n", f"{METHOD}\n", *picture, *(markdown(table) for table in parts)])
    html = render(
        "summary.html.j2",
        title=heading,
        method=METHOD,
        tables=[(table, [link and os.path.relpath(link, out) for link in table.links]) for table in parts],
        panels=charts,
    )
    write_atomically(out / "summary.md", text.encode())
    paths = dict(zip((str(run.dir) for run in summary.runs), names(summary.runs), strict=True))
    table = summary.table.assign(run=summary.table["run"].map(paths))
    write_atomically(out / "summary.csv", table.to_csv(index=False).encode())
    write_atomically(out / "summary.html", html.encode())
    if charts:
        write_atomically(out / "curves.png", png(charts))
    return summary


def title(summary: Summary, folders: Sequence[str | Path]) -> str:
    """`demo: 4 runs (3 completed, 1 crashed), 2 variants`; first the folders that were asked for."""
    folder = ", ".join(os.path.basename(os.path.abspath(folder)) for folder in folders)
    runs, variants = len(summary.runs), len(summary.variants.members)
    ended = statuses(summary.runs)
    return f"{folder}: {runs} run{'s' * (runs != 1)} ({ended}), {variants} variant{'s' * (variants != 1)}"


def panels(summary: Summary) -> list[Panel]:
    """A chart a metric: the mean of each variant's completed runs with its interval; each other run by itself."""
    charts = []
    for metric in summary.metrics:
        series, bands, single = {}, {}, {}
        for values, runs in summary.variants.members.items():
            label = summary.variants.label(values)
            completed = {run.dir: curve(run.metrics, metric) for run in runs if run.status == COMPLETED}
            single[label] = [curve(run.metrics, metric) for run in runs if run.status != COMPLETED]
            seeds = {run.dir: seed_of(run) for run in runs}
            interval = band(pd.DataFrame(completed).sort_index().T.groupby(seeds).mean().T)
            series[label] = interval["mean"]
            bands[label] = (interval["low"], interval["high"])
        ends = with_margin(pd.concat([curve(run.metrics, metric) for run in summary.runs]), 0.06)
        charts.append(Panel(title=metric, unit="", series=series, bands=bands, single=single, y=ends))
    return charts
