"""Several runs added up: each run's numbers for each metric, and their means over seeds."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pandas as pd

from prl.errors import ConfigError
from prl.monitors.metric_names import HELD_OUT, REWARDS
from prl.tools.report import statistics
from prl.tools.report.runs import Run
from prl.tools.report.variants import Variants, seed_of, variants

RISING = ("reward/*", HELD_OUT, "eval/*/pass@*", "eval/*/correct*", "metric/*", "ref_kl", "ref_kl/*/mean")
"""Patterns of the metrics that are better the higher they are."""
LAST, LAST_OF_EVAL = 5, 1
"""How many of its last values make up a metric's final one."""
STATISTICS = ("final", "best", "area", "steps", "tokens", "seconds")
OF_ANY = ("final", "area")
"""Those that mean something for a metric that is to fall, too."""
COLUMNS = ["metric", "variant", "run", "seed", "status", "first", *STATISTICS]
COMPLETED = "completed"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What is written, as numbers."""

    runs: list[Run]
    variants: Variants
    metrics: list[str]
    thresholds: dict[str, float]
    """Metric -> the value that steps, tokens and seconds are counted to; NaN where no run has the metric.

    Without `threshold` only those of `RISING` are in it; the others have the statistics of `OF_ANY` alone.
    """
    table: pd.DataFrame
    """A row for each metric and run with a config: metric, variant, run, seed, status, first, and `STATISTICS`.

    What a metric does not have is NaN.
    """

    def statistics_of(self, metric: str) -> tuple[str, ...]:
        """The statistics that the metric has."""
        return STATISTICS if metric in self.thresholds else OF_ANY

    def grouped(self, metric: str) -> pd.DataFrame:
        """A row a variant, over its completed runs: columns (mean | half | count, statistic), half as of the interval.

        Mean and interval are over seeds: runs of one seed count as their mean. `count` has how many runs have the
        statistic: for steps, tokens and seconds those that reached the threshold.
        """
        rows = self.table[(self.table["metric"] == metric) & (self.table["status"] == COMPLETED)]
        seeds = rows.groupby(["variant", "seed"])[list(STATISTICS)].mean().groupby("variant")
        count = rows.groupby("variant")[list(STATISTICS)].count()
        parts = {"mean": seeds.mean(), "half": seeds.agg(statistics.half_interval), "count": count}
        return pd.concat(parts, axis=1).reindex([self.variants.label(values) for values in self.variants.members])

    def curves(self, values: tuple[str, ...], metric: str, *, completed: bool) -> pd.DataFrame:
        """Curves of a variant's runs: a row a step, a column a run; of its completed runs, or of its others."""
        runs = [run for run in self.variants.members[values] if (run.status == COMPLETED) == completed]
        return pd.DataFrame({run.dir: statistics.curve(run.metrics, metric) for run in runs}).sort_index()


def summarise(runs: list[Run], metrics: Sequence[str] = (), threshold: float | None = None) -> Summary:
    """Add up runs.

    Args:
        runs: in the order in which they are listed.
        metrics: names, or patterns with `*`; none = `REWARDS`.
        threshold: for every metric. None = for each metric that is to rise (`RISING`) nine tenths of the way from its
            mean first value to the highest mean final value of a variant.

    Raises:
        ConfigError: a metric was asked for that no run has.
    """
    chosen, sorted_runs = _chosen(runs, metrics), variants(runs)
    members = [(sorted_runs.label(values), run) for values, group in sorted_runs.members.items() for run in group]
    thresholds, tables = {}, [pd.DataFrame(columns=COLUMNS)]
    for metric in chosen:
        curves = [statistics.curve(run.metrics, metric) for _, run in members]
        table = _measured(members, metric, curves)
        if threshold is not None or any(fnmatchcase(metric, pattern) for pattern in RISING):
            thresholds[metric] = _nearly(table) if threshold is None else threshold
            table = table.join(_until(members, curves, thresholds[metric]))
        tables.append(table)
    return Summary(
        runs=runs,
        variants=sorted_runs,
        metrics=chosen,
        thresholds=thresholds,
        table=pd.concat(tables[1:] or tables, ignore_index=True).reindex(columns=COLUMNS),
    )


def _chosen(runs: list[Run], patterns: Sequence[str]) -> list[str]:
    """Metrics of the runs that match, pattern by pattern."""
    recorded = dict.fromkeys(str(name) for run in runs for name in run.metrics)
    matched = {pattern: [name for name in recorded if fnmatchcase(name, pattern)] for pattern in patterns or REWARDS}
    for pattern in patterns:
        if not matched[pattern]:
            close = difflib.get_close_matches(pattern, recorded, n=3) or sorted(recorded)[:20] or ["none at all"]
            raise ConfigError(f"--metric {pattern}: no run has recorded it; there is {', '.join(close)}")
    return list(dict.fromkeys(name for names in matched.values() for name in names))


def _measured(members: list[tuple[str, Run]], metric: str, curves: list[pd.Series]) -> pd.DataFrame:
    """The rows of a metric, of which each member has a curve, with what any metric has."""
    last = LAST_OF_EVAL if metric.startswith("eval/") else LAST
    return pd.DataFrame(
        {
            "metric": metric,
            "variant": [label for label, _ in members],
            "run": [str(run.dir) for _, run in members],
            "seed": [seed_of(run) for _, run in members],
            "status": [run.status for _, run in members],
            "first": [curve.iloc[0] if len(curve) else math.nan for curve in curves],
            "final": [statistics.final(curve, last) for curve in curves],
            "area": [statistics.area(curve) for curve in curves],
        }
    )


def _nearly(table: pd.DataFrame) -> float:
    """Nine tenths of the way from the mean first value to the best variant's mean final one, over completed runs."""
    counted = table[table["status"] == COMPLETED]
    start, top = counted["first"].mean(), counted.groupby("variant")["final"].mean().max()
    return float(start + 0.9 * (top - start))


def _until(members: list[tuple[str, Run]], curves: list[pd.Series], threshold: float) -> pd.DataFrame:
    """For each run its highest value, and what it took to the threshold."""
    rows = [
        {"best": curve.max()} | statistics.until(run.metrics, curve, threshold)
        for (_, run), curve in zip(members, curves, strict=True)
    ]
    return pd.DataFrame.from_records(rows, columns=["best", "steps", "tokens", "seconds"])
