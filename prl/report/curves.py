"""The panels of a run's page: which curves there are, from its metrics."""

import re
from collections.abc import Iterator

import pandas as pd

from prl.report.plots import COLOURS, DASHES, Panel

PHASES = {
    "rollouts": "time/rollout",
    "update": "time/train",
    "waiting for rollouts": "time/wait_for_batch",
    "waiting for the policy": "time/wait_for_policy",
    "loading weights": "time/update_weights",
    "whole step": "time/step",
}
FIXED: list[tuple[str, str, dict[str, str], bool]] = [
    ("Entropy", "nats per token", {"entropy": "entropy/all/mean"}, True),
    ("Gap and KL", "nats per token", {"gap": "logprob_gap/mean", "KL to sampler": "mismatch_kl/all/mean"}, False),
    ("Loss", "nats per token", {"rl": "loss/rl", "ce": "loss/ce", "ref_kl": "loss/ref_kl"}, False),
    ("Gradient norm", "before clipping", {"norm": "grad_norm"}, True),
    ("Staleness", "policy versions", {"mean": "off_policy/mean", "max": "off_policy/max"}, True),
    ("Time by phase", "seconds per step", PHASES, True),
    ("Idle", "share of the step", {"engine": "idle/engine", "trainer": "idle/trainer"}, True),
    (
        "Throughput",
        "tokens per second",
        {"generated": "tokens/generated_per_second", "trained": "tokens/trained_per_second"},
        True,
    ),
    (
        "Rollouts not trained on",
        "per step",
        {"failed": "rollouts/errored", "too old": "off_policy/dropped", "surplus": "rollouts/surplus"},
        True,
    ),
]
BY_ENV = [  # title, unit, pattern of the key, whose groups name the curve; whether the axis begins at 0
    ("Reward", "mean of the step", r"reward/(.+)/mean", False),
    ("Parts and metrics", "mean of the step", r"metric/(.+)/(.+)", False),
    ("Evaluation", "held-out reward", r"eval/(.+)/avg@\d+", False),
    ("Divergence from the reference", "nats per token", r"ref_kl/(.+)/mean", True),
    ("Length", "sampled tokens", r"length/(.+)/mean", True),
    ("Truncated", "share of rollouts", r"truncated/(.+)", True),
    ("Filters", "share of the batch matched", r"filters/all/(.+)", True),
    ("Difficulty pools", "share of tasks", r"pool/(.+)", True),
]
MOST = COLOURS * len(DASHES)
"""Curves of a panel that can be told apart."""


def panels(metrics: pd.DataFrame) -> tuple[list[Panel], list[str]]:
    """The panels that have anything to show, and the titles of those whose curves are zero throughout."""
    made = {panel.title: panel for panel in _panels(metrics)}
    order = ["Reward", "Parts and metrics", "Evaluation", "Entropy", "Gap and KL", "Divergence from the reference"]
    order += ["Length", "Truncated", "Filters", "Difficulty pools", "Staleness", "Rollouts not trained on"]
    order += ["Loss", "Gradient norm", "Time by phase", "Idle", "Throughput"]
    shown = [made[title] for title in order if title in made]
    flat = [panel.title for panel in shown if all((series.fillna(0) == 0).all() for series in panel.series.values())]
    return [panel for panel in shown if panel.title not in flat], flat


def _panels(metrics: pd.DataFrame) -> Iterator[Panel]:
    ends = (float(metrics.index.min()), float(metrics.index.max())) if len(metrics) else None
    for title, unit, keys, zero in FIXED:
        series = {name: _series(metrics, key) for name, key in keys.items() if key in metrics}
        if title in ("Loss", "Rollouts not trained on"):
            series = {name: values for name, values in series.items() if (values != 0).any()} or series
        if series:
            log, peaks = title == "Gap and KL", title in ("Time by phase", "Throughput")
            yield Panel(title=title, unit=unit, series=series, zero=zero, x=ends, log=log, peaks=peaks)
    for title, unit, pattern, zero in BY_ENV:
        series = {}
        for key in metrics:
            if match := re.fullmatch(pattern, str(key)):
                name = " ".join(group for group in match.groups() if group)
                series[name] = _series(metrics, str(key)) * (-1 if title.startswith("Divergence") else 1)
        if series := _distinct(series):
            names = [*list(series)[:-1][: MOST - 1], list(series)[-1]]  # the last is `all`
            shown = {name: series[name] for name in names}
            yield Panel(title=title, unit=unit, series=shown, zero=zero, x=ends, left_out=len(series) - len(shown))


def _series(metrics: pd.DataFrame, key: str) -> pd.Series:
    return metrics[key].dropna()


def _distinct(series: dict[str, pd.Series]) -> dict[str, pd.Series]:
    """Without what all envs have together where there is but one, else that last."""
    if "all" in series and len(series) == 2:
        del series["all"]
    elif "all" in series:
        series["all"] = series.pop("all")
    for share in ("is_matched", "is_filtered"):  # beside a single filter, they say the same as it does
        if share in series and any(series[share].equals(other) for name, other in series.items() if name != share):
            del series[share]
    return series
