"""The panels of a run's page: which curves there are, and their numbers. `templates/curves.js` draws them."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prl.tools.report.html import rounded


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
    """`log`: the axis is logarithmic where all values are above 0; `peaks`: a few peaks far above the rest are cut."""


POINTS = 2_000
"""Most points of a curve in a page's file."""
Columns = dict[str, tuple[list[int], list[float | None]]]
"""Metric -> the steps where it was recorded, and its values there."""
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
    Kind("Learning rate", "of trainer.optim", {"rate": "lr"}, options={"log": True}),
    Kind("Loss", "nats per token", LOSSES, zero=False, only_nonzero=True),
    Kind("Gradient norm", "before clipping", {"norm": "grad_norm"}),
    Kind("Time by phase", "seconds per step", PHASES, options={"peaks": True}),
    Kind("Idle", "share of the step", {"engine": "idle/engine", "trainer": "idle/trainer"}),
    Kind("Throughput", "tokens per second", RATES, options={"peaks": True}),
)
"""All panels, in the order in which a page shows them."""


@functools.cache
def is_drawn(key: str) -> bool:
    """Return whether a panel has a curve of the metric."""
    return any(
        re.fullmatch(kind.curves, key) if isinstance(kind.curves, str) else key in kind.curves.values()
        for kind in KINDS
    )


def columns(lines: Sequence[Mapping[str, float | None]]) -> Columns:
    """The metrics that are drawn. Of several lines of a step the last one counts."""
    found = {}
    timed = [(int(line["step"] or 0), line) for line in lines if line.get("step") is not None]
    for key in dict.fromkeys(key for _, line in timed for key in line):
        if is_drawn(key):
            values = {step: line[key] for step, line in timed if line.get(key) is not None}
            found[key] = (list(values), list(values.values()))
    return {key: column for key, column in found.items() if column[0]}


def thinned(whole: Columns) -> Columns:
    """Every so-manieth point of each curve, at most `POINTS` of them, the last among them; values in four digits."""
    found = {}
    for key, (steps, values) in whole.items():
        places = range(len(steps))[:: -(len(steps) // POINTS + 1)][::-1]
        found[key] = ([steps[place] for place in places], [rounded(values[place]) for place in places])
    return found
