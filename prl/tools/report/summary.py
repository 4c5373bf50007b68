"""Several runs added up: each run's numbers for each metric, and their means over seeds."""

import contextlib
import difflib
import glob
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import pandas as pd

from prl.base.errors import ConfigError, PrlError
from prl.base.metric_names import REWARDS
from prl.config.schema import OptimizedMetricConfig
from prl.tools.report import statistics
from prl.tools.report.comparison import Comparison, compare, options_of
from prl.tools.report.runs import COMPLETED, Run
from prl.tools.report.variants import Variants, seed_of, variants
from prl.tools.sweep.metric import objective, trained_steps

STATISTICS = ("final", "highest")
TO_THRESHOLD = ("steps", "tokens", "seconds")
WITHOUT_REWARDS = ("loss/*", "grad_norm")
"""Metrics shown of runs without rewards: models of a Tinker server, whose clients keep theirs."""
COLUMNS = ["metric", "variant", "run", "seed", "status"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The summary of a run, as numbers."""

    runs: list[Run]
    variants: Variants
    metrics: list[str]
    threshold: float | None
    """The value of a metric that steps, tokens and seconds are counted to; None = they are not."""
    table: pd.DataFrame
    """A row for each metric and run with a config: `COLUMNS`, and the statistics. What a metric lacks is NaN."""
    comparison: Comparison


def summarise(
    runs: list[Run], metrics: Sequence[str] = (), threshold: float | None = None, *, named: bool = False
) -> Summary:
    """Add up runs.

    Args:
        runs: those of a variant in the order in which they are listed.
        metrics: names, or patterns with `*`; none = `REWARDS`.
        threshold: of every metric; None = none is asked for.
        named: The runs are of several places, and are told apart by their names.

    Raises:
        ConfigError: a metric was asked for that no run has.
    """
    chosen, by_variant = _chosen(runs, metrics), variants(runs, named=named)
    found = compare(by_variant, metrics)
    ordered = [run for group in by_variant.members.values() for run in group]
    options = options_of([run for run in ordered if run.status == COMPLETED])
    finals = {run.dir: _finals(run, chosen, options) for run in ordered}
    rows = [
        {"metric": metric, "variant": by_variant.label(values), "final": finals[run.dir][metric]}
        | _numbers(run, metric, threshold)
        for metric in chosen
        for values, group in by_variant.members.items()
        for run in group
    ]
    columns = [*COLUMNS, *STATISTICS, *(TO_THRESHOLD if threshold is not None else ())]
    table = pd.DataFrame.from_records(rows, columns=columns)
    runs = ordered + [run for run in runs if not run.config]
    return Summary(runs=runs, variants=by_variant, metrics=chosen, threshold=threshold, table=table, comparison=found)


def _chosen(runs: list[Run], patterns: Sequence[str]) -> list[str]:
    """Metrics of the runs that match, pattern by pattern."""
    recorded = dict.fromkeys(str(name) for run in runs for name in run.metrics)
    rewarded = any(fnmatchcase(name, pattern) for name in recorded for pattern in REWARDS)
    asked = patterns or (REWARDS if rewarded else WITHOUT_REWARDS)
    matched = {pattern: [name for name in recorded if fnmatchcase(name, pattern)] for pattern in asked}
    for pattern in patterns:
        if not matched[pattern]:
            close = difflib.get_close_matches(pattern, recorded, n=3) or sorted(recorded)[:20] or ["none at all"]
            raise ConfigError(f"--metric {pattern}: no run has recorded it; there is {', '.join(close)}")
    return list(dict.fromkeys(name for names in matched.values() for name in names))


def _finals(run: Run, metrics: Sequence[str], options: OptimizedMetricConfig) -> dict[str, float]:
    """Return what a run has of each metric in its last steps, averaged as the objective is; NaN without a number."""
    finals = dict.fromkeys(metrics, math.nan)
    with contextlib.suppress(PrlError):
        lines = trained_steps(run.dir)
        for metric in metrics:
            with contextlib.suppress(PrlError):
                finals[metric] = objective(lines, replace(options, key=glob.escape(metric)), {})
    return finals


def _numbers(run: Run, metric: str, threshold: float | None) -> dict[str, Any]:
    """Return what a run has of a metric."""
    curve = statistics.curve(run.metrics, metric)
    numbers = {
        "run": str(run.dir),
        "seed": seed_of(run),
        "status": run.status,
        "highest": curve.max(),
    }
    return numbers if threshold is None else numbers | statistics.until(run.metrics, curve, threshold)
