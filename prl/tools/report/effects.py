"""The effect of each key of a grid: its values compared with all else equal, the other keys and the seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from prl.tools.report.statistics import ROUNDING, half_interval
from prl.tools.report.variants import in_order, interval, number

LEAST = 2
"""Fewest pairs of runs that an interval can be made of."""


@dataclass(frozen=True)
class Effect:
    """The values of a key, compared pair by pair."""

    key: str
    sign: int
    """1 where more of the objective is better, -1 where less is."""
    runs: pd.DataFrame
    """The objective: a row for each setting of the other keys with each seed (levels `key <number>` and `seed`), a
    column for each value of the key, in order. NaN: not completed."""

    def gains(self, value: str, other: str) -> pd.Series:
        """For each pair of runs how much better it is with one value than with the other."""
        return (self.sign * (self.runs[value] - self.runs[other])).dropna()

    @property
    def ranked(self) -> list[str]:
        """The values that have pairs, best first: by their mean gain over the others, which a missing run does not
        favour as it would a mean of all runs."""
        means = {
            value: pd.Series([self.gains(value, other).mean() for other in self.runs if other != value]).mean()
            for value in self.runs
        }
        return [str(value) for value in pd.Series(means).dropna().sort_values(ascending=False, kind="stable").index]

    @property
    def sentence(self) -> str:
        """`lr: 0.001 is ahead of 0.01 by 0.300 ± 0.050, 9 pairs`; of several values the next and the last are named."""
        best, *others = self.ranked
        named = dict.fromkeys([others[0], others[-1]])
        return f"{self.key}: {best} " + "; it ".join(
            relation(self.gains(best, other), other, "pair", "too few to tell") for other in named
        )


def effects(
    values: pd.DataFrame, keys: Sequence[str], settings: Mapping[str, tuple[str, ...]], sign: int
) -> list[Effect]:
    """The effects of the keys of a grid, largest first; none where fewer than two keys have any: it is no grid.

    Args:
        values: the objective, a row a seed, a column a variant.
        keys: that vary between the variants.
        settings: variant -> its values of the keys.
        sign: 1 where more of the objective is better, -1 where less is.
    """
    runs = values.unstack().dropna().reset_index()  # variant, seed, objective
    runs.columns = ["variant", "seed", "objective"]
    columns = [f"key {place}" for place in range(len(keys))]
    runs[columns] = [settings[variant] for variant in runs["variant"]]
    found = []
    for place, key in enumerate(keys):
        others = [column for column in columns if column != columns[place]]
        table = runs.pivot(index=[*others, "seed"], columns=columns[place], values="objective")
        order = in_order(values[place] for values in settings.values())
        effect = Effect(key, sign, table[[value for value in order if value in table]])
        if (effect.runs.count(axis=1) > 1).sum() >= LEAST:  # rows with a pair
            found.append(effect)
    found.sort(key=lambda effect: -effect.gains(effect.ranked[0], effect.ranked[-1]).mean())
    return found if len(found) > 1 else []


def relation(ahead: pd.Series, other: str, unit: str, advice: str) -> str:
    """Return how what is `ahead` by these differences, one a `unit`, is related to the `other`, as a predicate."""
    mean, half, count = ahead.mean(), half_interval(ahead), ahead.count()
    if count < LEAST:
        return f"has {several(count, unit)} in common with {other}: {advice}"
    if ahead.abs().max() < ROUNDING:
        return f"equals {other} in every {unit}, {several(count, unit)}"
    if abs(mean) < ROUNDING:
        return f"ties with {other}: the means are equal, the difference is 0 ± {number(half)}, {several(count, unit)}"
    apart = f"{interval(abs(mean), half)}, {several(count, unit)}"
    if abs(mean) <= half:
        return f"can't be told apart from {other}: {'-' if mean < 0 else '+'}{apart}"
    return f"is {'ahead of' if mean > 0 else 'behind'} {other} by {apart}"


def several(count: int, unit: str) -> str:
    """`5 seeds`, `1 seed`."""
    return f"{count} {unit}s" if count != 1 else f"1 {unit}"
