"""The panels of a run's page: which curves there are, from its metrics."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from prl.tools.report.plots import Panel


@dataclass(frozen=True)
class Kind:
    """A panel that a page may have: its curves by name and metric, or those of all metrics that a pattern matches."""

    title: str
    unit: str
    curves: Mapping[str, str] | str
    """Name -> metric; or a pattern of metrics, whose groups name the curve."""
    zero: bool = True
    """The axis begins at 0."""
    sign: int = 1
    only_nonzero: bool = False
    """Leave out the curves that are zero throughout, unless all are."""
    shows_zeros: bool = False
    """The panel is there even where all its curves are zero throughout."""
    options: Mapping[str, Any] | None = None
    """Further fields of `Panel`."""


PHASES = {
    "rollouts": "time/rollout",
    "update": "time/train",
    "waiting for rollouts": "time/wait_for_batch",
    "waiting for the policy": "time/wait_for_policy",
    "loading weights": "time/update_weights",
    "whole step": "time/step",
}
GAPS = {"gap": "logprob_gap/mean", "KL to sampler": "mismatch_kl/all/mean"}
LOSSES = {"rl": "loss/rl", "ce": "loss/ce", "ref_kl": "loss/ref_kl"}
LOST = {"failed": "rollouts/errored", "too old": "off_policy/dropped", "surplus": "rollouts/surplus"}
RATES = {"generated": "tokens/generated_per_second", "trained": "tokens/trained_per_second"}
KINDS = (
    Kind("Reward", "mean of the step", r"reward/(.+)/mean", zero=False, shows_zeros=True),
    Kind("Parts and metrics", "mean of the step", r"metric/(.+)/(.+)", zero=False),
    Kind("Logged", "mean of the step", r"log/([^/]+)/(.+)", zero=False),
    Kind("Evaluation", "held-out reward", r"eval/(.+)/avg@\d+", zero=False, shows_zeros=True),
    Kind("Entropy", "nats per token", {"entropy": "entropy/all/mean"}),
    Kind("Gap and KL", "nats per token", GAPS, zero=False, options={"log": True}),
    Kind("Divergence from the reference", "nats per token", r"ref_kl/(.+)/mean", sign=-1),
    Kind("Length", "sampled tokens", r"length/(.+)/mean"),
    Kind("Truncated", "share of rollouts", r"truncated/(.+)"),
    Kind("Filters", "share of the batch matched", r"filters/all/(.+)"),
    Kind("Difficulty pools", "share of tasks", r"pool/(.+)"),
    Kind("Staleness", "policy versions", {"mean": "off_policy/mean", "max": "off_policy/max"}),
    Kind("Rollouts not trained on", "per step", LOST, only_nonzero=True),
    Kind("Loss", "nats per token", LOSSES, zero=False, only_nonzero=True),
    Kind("Gradient norm", "before clipping", {"norm": "grad_norm"}),
    Kind("Time by phase", "seconds per step", PHASES, options={"peaks": True}),
    Kind("Idle", "share of the step", {"engine": "idle/engine", "trainer": "idle/trainer"}),
    Kind("Throughput", "tokens per second", RATES, options={"peaks": True}),
)
"""All panels, in the order in which a page shows them."""


def panels(metrics: pd.DataFrame) -> list[Panel]:
    """The panels that have anything to show; most have nothing where their curves are zero throughout."""
    shown = []
    for kind in KINDS:
        series = named_series(kind, metrics)
        nonzero = {name: values for name, values in series.items() if (values.fillna(0) != 0).any()}
        if nonzero or (series and kind.shows_zeros):
            drawn = nonzero if kind.only_nonzero else series
            shown.append(Panel(title=kind.title, unit=kind.unit, series=drawn, zero=kind.zero, **(kind.options or {})))
    return shown


def named_series(kind: Kind, metrics: pd.DataFrame) -> dict[str, pd.Series]:
    """The curves of a panel by name."""
    if not isinstance(kind.curves, str):
        return {name: metrics[key].dropna() for name, key in kind.curves.items() if key in metrics}
    series: dict[str, pd.Series] = {}
    for key in metrics:
        if match := re.fullmatch(kind.curves, str(key)):
            series[" ".join(match.groups())] = metrics[key].dropna() * kind.sign
    return distinct(series)


def distinct(series: dict[str, pd.Series]) -> dict[str, pd.Series]:
    """The curves without what all envs have together where there is but one, else that last."""
    of_all = {"all": series.pop("all")} if "all" in series else {}
    return series if len(series) == 1 else series | of_all
