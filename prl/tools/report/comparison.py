"""A verdict on the variants of a sweep, in sentences: the best one against each other, seed by seed."""

import contextlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from prl.base.errors import PrlError
from prl.base.metric_names import HELD_OUT, REWARDS, SAMPLED
from prl.config.build import read
from prl.config.schema import OptimizedMetricConfig
from prl.tools.report.statistics import half_interval
from prl.tools.report.variants import Variants, number, seed_of
from prl.tools.sweep.metric import optimized

NAMES = {HELD_OUT: "held-out reward", SAMPLED: "training reward"}
LISTED = 8
"""Most variants that the best one is compared with in sentences, and that a table has a column each for."""


@dataclass(frozen=True)
class Comparison:
    """Variants compared by the optimised metric of their completed runs."""

    metric: str
    sign: int
    """1 where more of it is better, -1 where less is."""
    values: pd.DataFrame
    """A row a seed, a column a variant (its label), best first among those with the same envs. NaN: not completed.
    Runs of one seed are averaged."""
    envs: Mapping[str, str] = field(default_factory=dict)
    """Variant -> the names of its envs. Rewards of other envs say nothing about a variant."""
    without: Mapping[str, int] = field(default_factory=dict)
    """Variant -> its completed runs that are left out: the metric is missing, or was not finite."""
    unfinished: Mapping[str, int] = field(default_factory=dict)
    """Variant -> its runs that have not completed, where there are any."""

    @property
    def by_envs(self) -> dict[str, list[str]]:
        """Names of envs -> the variants that have these, best first."""
        found: dict[str, list[str]] = {}
        for label in self.values:
            found.setdefault(self.envs.get(label, ""), []).append(label)
        return found

    @property
    def verdict(self) -> list[str]:
        """The best variant against each other with the same envs, in sentences."""
        by_envs = self.by_envs
        found = [] if by_envs else ["Nothing to compare: no run has completed with this metric."]
        for envs, labels in by_envs.items():
            part = replace(self, values=self.values[labels].dropna(how="all"))
            start = f"{envs}: " if len(by_envs) > 1 else ""
            found += [start + sentence for sentence in part._sentences()]
        if self.without:
            found.append(f"Completed runs without a finite value of it are left out: {counted(self.without)}.")
        if self.unfinished:
            found.append(f"Runs that have not completed are left out: {counted(self.unfinished)}.")
        return found

    def _sentences(self) -> list[str]:
        best, *others = self.values
        level = f"{number(self.values[best].mean())}, {seeds(self.values[best].count())}"
        if not others:
            return [f"One variant, nothing to compare: {level}."]
        if len(self.values) == 1:
            return [f"{word(best)} is best: {level}. One seed shows no spread: run each with seed=0,1,2."]
        # The first column has most seeds. With fewer, another may have the better mean by luck.
        highest = (self.sign * self.values.mean()).idxmax()
        among = "the best mean" if highest == best else "the best mean of those with most seeds"
        first = [f"{word(best)} has {among}: {level}."] if len(others) > 1 or highest != best else []
        subject = "It" if first else word(best)
        more = [f"The table has {len(others) - LISTED} more."] if len(others) > LISTED else []
        return [*first, *(f"{subject} {self.related(best, other)}" for other in others[:LISTED]), *more]

    def related(self, best: str, other: str) -> str:
        """Return how a variant is related to another: the mean of the differences by seed, and its t interval."""
        # Seed by seed: what a seed does to both variants cancels out of the difference.
        ahead = self.sign * (self.values[best] - self.values[other])
        mean, half, count = ahead.mean(), half_interval(ahead), ahead.count()
        if count < 2:
            return f"has {seeds(count)} in common with {word(other)}: run both with seed=0,1,2."
        interval = f"{number(abs(mean))} ± {number(half)}, {seeds(count)}."
        if abs(mean) <= half:
            return f"can't be told apart from {word(other)}: {'-' if mean < 0 else '+'}{interval}"
        return f"is {'ahead of' if mean > 0 else 'behind'} {word(other)} by {interval}"


def compare(variants: Variants, metrics: Sequence[str] = ()) -> Comparison:
    """Compare variants by the first reward among `metrics`, else by `optimized_metric` of the first run's config.

    Best first among those with the same envs; variants that lack seeds come after those that have more. Whether more of
    another metric is better, nothing says.

    Raises ConfigError for a config of another version of prl, whose `optimized_metric` cannot be read.
    """
    labelled = [(variants.label(values), run) for values, runs in variants.members.items() for run in runs]
    completed = [(label, run) for label, run in labelled if run.status == "completed"]
    unfinished = Counter(label for label, run in labelled if run.status != "completed")
    given = completed[0][1].config.get("optimized_metric", {}) if completed else {}
    options = read(OptimizedMetricConfig, given, "optimized_metric")
    asked = next((name for name in metrics if re.match(r"eval/.*(avg|pass)@|reward/", name)), options.key)
    for key in [asked] if asked else REWARDS:
        rows = []
        for label, run in completed:
            with contextlib.suppress(PrlError):  # it has no such metric
                rows.append((seed_of(run), label, optimized(run.dir, replace(options, key=key))))
        if rows:
            break
    without = Counter(label for label, _ in completed) - Counter(label for _, label, _ in rows)
    table = pd.DataFrame(rows, columns=["seed", "variant", "value"])
    sign = -1 if key == options.key and options.direction == "minimize" else 1
    # Runs of one seed are no further evidence: they count as one, their mean.
    values = table.groupby(["seed", "variant"], sort=False)["value"].mean().unstack()
    envs = {label: ", ".join(run.config.get("envs", ())) for label, run in completed}
    place = {names: number for number, names in enumerate(dict.fromkeys(envs.values()))}
    places = [place[envs[label]] for label in values]
    order = pd.DataFrame({"envs": places, "seeds": values.count(), "mean": sign * values.mean()})
    ranked = order.sort_values(["envs", "seeds", "mean"], ascending=[True, False, False], kind="stable").index
    return Comparison(NAMES.get(key, key), sign, values[ranked], envs, without, unfinished)


def counted(runs: Mapping[str, int]) -> str:
    """`grpo 1, max_rl 2`."""
    return ", ".join(f"{word(label)} {count}" for label, count in runs.items())


def word(label: str) -> str:
    """A variant in a sentence: `grpo` for `algo=grpo`; `lr=0.1 loss=aipo` where a value alone does not say enough."""
    match = re.fullmatch(r"[^=,]+=(?!(?:true|false|null|none)$)([A-Za-z][\w.-]*)", label)
    return match[1] if match else label.replace(", ", " ")


def seeds(count: int) -> str:
    """`5 seeds`."""
    return f"{count} seeds" if count != 1 else "1 seed"
