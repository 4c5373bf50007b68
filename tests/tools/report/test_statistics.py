"""The numbers of a report against ones worked out by hand."""

import math

import pandas as pd
import pytest

from prl.tools.report.statistics import band, curve, half_interval, until

T = {1: 12.706205, 2: 4.302653, 3: 3.182446}
"""97.5 % quantile of Student's t, from a printed table: degrees of freedom -> value."""


def series(values):
    return pd.Series(values, dtype=float)


def test_a_curve_is_where_the_metric_was_recorded():
    metrics = pd.DataFrame({"a": [1.0, math.nan, 3.0]}, index=[0, 5, 10])
    assert curve(metrics, "a").to_dict() == {0: 1, 10: 3}
    assert curve(metrics, "b").empty


def test_what_it_took_to_a_threshold():
    metrics = pd.DataFrame(
        {
            "eval": [0.1, math.nan, 0.5, math.nan, 0.5],
            "tokens/generated": [math.nan, 10, 20, 40, 80],
            "time/step": [math.nan, 1, 2, math.nan, 8],
        },
        index=range(5),
    )
    values = curve(metrics, "eval")
    at_half = {"steps": 2, "tokens": 30, "seconds": 3}
    assert until(metrics, values, 0.5) == at_half, "reached exactly, and the first time"
    assert until(metrics, values, 0.05) == {"steps": 0, "tokens": 0, "seconds": 0}
    assert all(math.isnan(value) for value in until(metrics, values, 0.6).values())
    assert until(metrics[["eval"]], values, 0.5)["steps"] == 2
    assert math.isnan(until(metrics[["eval"]], values, 0.5)["tokens"])
    assert math.isnan(until(metrics, series({}), 0)["steps"])


def test_the_interval_over_seeds():
    # 1, 2, 3: standard deviation 1, standard error 1 / sqrt(3)
    assert half_interval(series([1, 2, 3])) == pytest.approx(T[2] / math.sqrt(3), rel=1e-6)
    # 0, 1: standard deviation sqrt(1/2), standard error 1/2
    assert half_interval(series([0, math.nan, 1])) == pytest.approx(T[1] / 2, rel=1e-6)
    assert half_interval(series([0.4, 0.4, 0.4])) == pytest.approx(0, abs=1e-12)
    assert math.isnan(half_interval(series([1]))) and math.isnan(half_interval(series([])))


def test_a_band_is_the_interval_or_of_few_seeds_the_range():
    nan = math.nan
    curves = pd.DataFrame({"a": [0, 1, 5, nan], "b": [1, 3, nan, nan], "c": [2, 2, nan, nan], "d": [3, nan, nan, nan]})
    found = band(curves)
    assert list(found["mean"])[:3] == [1.5, 2, 5]
    # 0, 1, 2, 3: standard deviation sqrt(5/3), standard error half of it
    half = T[3] * math.sqrt(5 / 3) / 2
    assert (found["low"][0], found["high"][0]) == pytest.approx((1.5 - half, 1.5 + half), rel=1e-6)
    assert (found["low"][1], found["high"][1]) == (1, 3) and (found["low"][2], found["high"][2]) == (5, 5)
    assert found.loc[3].isna().all()
