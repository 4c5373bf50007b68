"""A verdict on the variants of a sweep, in sentences: the best one against each other, seed by seed."""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from prl.base.errors import PrlError
from prl.base.metric_names import HELD_OUT, REWARDS, SAMPLED, held_out
from prl.config.build import read
from prl.config.schema import OptimizedMetricConfig
from prl.tools.report.effects import Effect, effects, relation, several
from prl.tools.report.runs import Run
from prl.tools.report.statistics import ROUNDING
from prl.tools.report.variants import Variants, number, seed_of
from prl.tools.sweep.metric import optimized, source_of

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
    instead: str = ""
    """Metric by which more of the completed runs could be compared; empty where there is none."""
    unfinished: Mapping[str, int] = field(default_factory=dict)
    """Variant -> its runs that have not completed, where there are any."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Variant -> whose rewards its completed runs have, where they have none of the policy's own (`source_of`)."""
    keys: Sequence[str] = ()
    """Keys that vary between the variants."""
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Variant -> its values of the keys."""

    @functools.cached_property
    def effects(self) -> list[Effect]:
        """The effects of the keys, where the variants are a grid; all of them must have the same envs."""
        return effects(self.values, self.keys, self.settings, self.sign) if self.settings else []

    @property
    def parts(self) -> dict[str, "Comparison"]:
        """The comparisons of the variants with the same envs, by what to write in front of a sentence about one."""
        by_envs: dict[str, list[str]] = {}
        for label in self.values:
            by_envs.setdefault(self.envs.get(label, ""), []).append(label)
        tables = {f"{envs}: ": self.values[labels].dropna(how="all") for envs, labels in by_envs.items()}
        return {start if len(tables) > 1 else "": replace(self, values=table) for start, table in tables.items()}

    @property
    def verdict(self) -> list[str]:
        """The best variant against each other with the same envs, in sentences."""
        found = [] if len(self.values) else ["Nothing to compare: no run has completed with this metric."]
        for start, part in self.parts.items():
            found += [start + sentence for sentence in part._sentences()]
        for label, source in self.sources.items():
            why = f"its rewards in training are those of {source}, not the policy's"
            found.append(f"{word(label)} is left out: {why}. Evaluate it (orchestrator.eval.every=5).")
        if self.without:
            found.append(f"Completed runs without a finite value of it are left out: {counted(self.without)}.")
        if self.instead:
            found.append(f"To compare more of them: prl report … --metric {self.instead}.")
        if self.unfinished:
            found.append(f"Runs that have not completed are left out: {counted(self.unfinished)}.")
        return found

    def _sentences(self) -> list[str]:
        best, *others = self.values
        means = self.sign * self.values.mean()
        level = f"{number(self.values[best].mean())}, {several(self.values[best].count(), 'seed')}"
        if not others:
            return [f"One variant, nothing to compare: {level}."]
        # The first column has most seeds. With fewer, another may have the better mean by luck.
        highest = means[best] >= means.max() - ROUNDING
        leaders = [word(label) for label in self.values if abs(means[label] - means[best]) < ROUNDING]
        names, plural = " and ".join(leaders), len(leaders) > 1
        effects = [f"{effect.sentence}." for effect in self.effects]
        if len(self.values) == 1:
            first = f"{names} {'are' if plural else 'is'} best: {level}."
            return [f"{first} One seed shows no spread: run each with seed=0,1,2.", *effects]
        among = "the best mean" if highest else "the best mean of those with most seeds"
        first = f"{names} {'have' if plural else 'has'} {among}: {level}."
        if effects:
            return [first, *effects]
        if len(others) == 1 and highest:
            return [f"{word(best)} {self.related(best, others[0])}."]
        subject = word(best) if plural else "It"
        more = [f"The table has {len(others) - LISTED} more."] if len(others) > LISTED else []
        return [first, *(f"{subject} {self.related(best, other)}." for other in others[:LISTED]), *more]

    def related(self, best: str, other: str) -> str:
        """Return how a variant is related to another: the mean of the differences by seed, and its t interval."""
        # Seed by seed: what a seed does to both variants cancels out of the difference.
        ahead = self.sign * (self.values[best] - self.values[other])
        return relation(ahead, word(other), "seed", "run both with seed=0,1,2")


def compare(variants: Variants, metrics: Sequence[str] = ()) -> Comparison:
    """Compare variants by the first reward among `metrics`, else by `optimized_metric` of the first run's config.

    Best first among those with the same envs; variants that lack seeds come after those that have more. Whether more of
    another metric is better, nothing says.

    Raises ConfigError for a config of another version of prl, whose `optimized_metric` cannot be read.
    """
    labelled = [(variants.label(values), run) for values, runs in variants.members.items() for run in runs]
    completed = [(label, run) for label, run in labelled if run.status == "completed"]
    unfinished = Counter(label for label, run in labelled if run.status != "completed")
    options = options_of([run for _, run in completed])
    asked = next((name for name in metrics if re.match(r"eval/.*(avg|pass)@|reward/", name)), options.key)
    # The first reward that any run has; the held-out one comes first.
    for key in [asked] if asked else REWARDS:
        rows = _rows(completed, replace(options, key=key))
        if rows:
            break
    # Evaluations of a few are no verdict on the others.
    few = not asked and key == HELD_OUT and len(rows) < len(completed)
    instead = SAMPLED if few and len(_rows(completed, replace(options, key=SAMPLED))) > len(rows) else ""
    without = Counter(label for label, _ in completed) - Counter(label for _, label, _ in rows)
    # Rewards of what a frozen model sampled say nothing of the policy.
    sources = {}
    for label, run in completed:
        source = source_of(run.config, asked or SAMPLED)
        if label in without and source and (asked or not held_out(run.metrics)):
            sources[label] = source
            del without[label]
    table = pd.DataFrame(rows, columns=["seed", "variant", "value"])
    sign = -1 if key == options.key and options.direction == "minimize" else 1
    # Runs of one seed are no further evidence: they count as one, their mean.
    values = table.groupby(["seed", "variant"], sort=False)["value"].mean().unstack()
    envs = {label: ", ".join(map(str, run.config.get("envs") or ())) for label, run in completed}
    place = {names: number for number, names in enumerate(dict.fromkeys(envs.values()))}
    places = [place[envs[label]] for label in values]
    order = pd.DataFrame({"envs": places, "seeds": values.count(), "mean": sign * values.mean()})
    ranked = order.sort_values(["envs", "seeds", "mean"], ascending=[True, False, False], kind="stable").index
    settings = {variants.label(values): values for values in variants.members}
    name = NAMES.get(key, key)
    return Comparison(name, sign, values[ranked], envs, without, instead, unfinished, sources, variants.heads, settings)


def _rows(completed: Sequence[tuple[str, Run]], options: OptimizedMetricConfig) -> list[tuple[str, str, float]]:
    """The seed, the label and the objective of each run that has one."""
    rows = []
    for label, run in completed:
        with contextlib.suppress(PrlError):  # it has no such metric
            rows.append((seed_of(run), label, optimized(run.dir, options, run.config)))
    return rows


def options_of(runs: Sequence[Run]) -> OptimizedMetricConfig:
    """The first run's options of the objective. Raises ConfigError for those of another version of prl."""
    given = runs[0].config.get("optimized_metric", {}) if runs else {}
    return read(OptimizedMetricConfig, given, "optimized_metric")


def counted(runs: Mapping[str, int]) -> str:
    """`grpo (1), max_rl (2)`."""
    return ", ".join(f"{word(label)} ({count})" for label, count in runs.items())


def word(label: str) -> str:
    """A variant in a sentence: `grpo` for `algo=grpo`; `lr=0.1 loss=aipo` where a value alone does not say enough."""
    match = re.fullmatch(r"[^=,]+=(?!(?:true|false|null|none)$)([A-Za-z][\w.-]*)", label)
    return match[1] if match else label.replace(", ", " ")
