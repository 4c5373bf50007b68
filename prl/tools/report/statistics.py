"""Numbers of a curve, and their mean and interval over seeds. A curve is a series, step -> value, without NaN."""

import math
from typing import Any

import pandas as pd
from scipy.special import stdtrit

LEVEL = 0.95
"""Level of the intervals."""
ROUNDING = 1e-12
"""Smaller differences of rewards come of rounding: they are none."""
FEW = 4
"""Fewer seeds than this are shown one by one and with their range: a t interval of so few is many times as wide."""


def curve(metrics: pd.DataFrame, metric: str) -> pd.Series:
    """A metric where it was recorded; empty for a run without it."""
    return metrics[metric].dropna() if metric in metrics else pd.Series(dtype=float)


def until(metrics: pd.DataFrame, values: pd.Series, threshold: float) -> dict[str, float]:
    """Return what it took until the first value at or above the threshold; NaN where there is none, or it was not
    recorded.

    Returns:
        steps: the step of that value.
        tokens: sampled until then: the sum of `tokens/generated`.
        seconds: from step 0 until then, the start of the engine left out: the sum of `time/step`.
    """
    reached = values.index[values >= threshold]
    if not len(reached):
        return {"steps": math.nan, "tokens": math.nan, "seconds": math.nan}
    before = metrics.loc[: reached[0]]
    spent = {
        name: float(before[key].sum()) if key in metrics else math.nan
        for name, key in (("tokens", "tokens/generated"), ("seconds", "time/step"))
    }
    return {"steps": float(reached[0]), **spent}


def half_interval(values: pd.Series | pd.DataFrame, axis: int = 0) -> Any:
    """Half the width of the t interval of the mean over an axis: t(n - 1) times the standard error.

    NaN values are left out. NaN for fewer than two: one seed says nothing about the spread.
    """
    return values.sem(axis=axis) * stdtrit(values.notna().sum(axis=axis) - 1, (1 + LEVEL) / 2)


def plus_minus(values: pd.Series, sign: str = "") -> str:
    """`0.650 ± 0.012`: the mean and half its interval, of as few as two values; `sign="+"` for a difference."""
    return f"{values.mean():{sign}.3f} ± {half_interval(values):.3f}"


def band(curves: pd.DataFrame) -> pd.DataFrame:
    """Mean over the columns (seeds) and the interval around it, a row a step: mean, low, high.

    A step counts the seeds that recorded it. With fewer than `FEW`, low and high are the lowest and the highest.
    """
    mean, half = curves.mean(axis=1), half_interval(curves, axis=1)
    few = curves.notna().sum(axis=1) < FEW
    low, high = (mean - half).mask(few, curves.min(axis=1)), (mean + half).mask(few, curves.max(axis=1))
    return pd.DataFrame({"mean": mean, "low": low, "high": high})
