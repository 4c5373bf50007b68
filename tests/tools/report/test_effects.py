"""The effect of each key of a grid, against numbers worked out by hand and against plain loops."""

import itertools
import math
import random

import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from prl.tools.report.comparison import Comparison
from prl.tools.report.runs import find_runs, read_run
from prl.tools.report.statistics import half_interval
from prl.tools.report.summary import summarise
from prl.tools.report.tables import DARKEST, tables


def grid(cells, keys=("lr", "size"), sign=1):
    """The comparison of a grid: values of the keys -> the objective in each seed, None where it has not completed."""
    labels = {values: ", ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True)) for values in cells}
    values = pd.DataFrame({labels[place]: column for place, column in cells.items()}, dtype=float)
    order = (sign * values.mean()).sort_values(ascending=False, kind="stable").index
    settings = {label: values for values, label in labels.items()}
    return Comparison("reward", sign, values[order], keys=keys, settings=settings)


def test_values_are_compared_pair_by_pair():
    found = grid(
        {("0.1", "a"): [0.5, 0.6], ("0.1", "b"): [0.8, 0.8], ("0.2", "a"): [0.4, 0.4], ("0.2", "b"): [0.6, 0.8]}
    )
    # size: b - a is 0.3, 0.2, 0.2, 0.4: mean 0.275, deviations 0.025, -0.075, -0.075, 0.125, squares 0.0275
    # lr: 0.1 - 0.2 is 0.1, 0.2, 0.2, 0.0: mean 0.125, the squares are the same; 97.5 % of t with 3 degrees: 3.182446
    half = 3.182446 * math.sqrt(0.0275 / 3) / 2
    assert f"{half:.3f}" == "0.152"
    assert found.verdict == [
        "lr=0.1 size=b has the best mean: 0.800, 2 seeds.",
        "size: b is ahead of a by 0.275 ± 0.152, 4 pairs.",
        "lr: 0.1 can't be told apart from 0.2: +0.125 ± 0.152, 4 pairs.",
    ]


def test_a_missing_cell_favours_nobody():
    """The mean of the runs with 0.1 is lower, because those of the good size are missing."""
    found = grid({("0.1", "s"): [0.2, 0.3], ("0.2", "s"): [0.1, 0.2], ("0.2", "l"): [0.9, 0.8]})
    assert [effect.key for effect in found.effects] == ["size", "lr"]
    assert found.verdict[2] == "lr: 0.1 is ahead of 0.2 by 0.100 ± 0.000, 2 pairs."


def test_of_several_values_the_next_and_the_last_are_named():
    heights = {"1": 0.1, "3": 0.4, "10": 0.5, "30": 0.2}
    found = grid({(lr, size): [heights[lr] + 0.01 * (size == "8")] for lr in heights for size in ("4", "8")})
    assert found.verdict == [
        "lr=10 size=8 is best: 0.510, 1 seed. One seed shows no spread: run each with seed=0,1,2.",
        "lr: 10 is ahead of 3 by 0.100 ± 0.000, 2 pairs; it is ahead of 1 by 0.400 ± 0.000, 2 pairs.",
        "size: 8 is ahead of 4 by 0.010 ± 0.000, 4 pairs.",
    ]


def test_less_can_be_better():
    found = grid({("1", "a"): [2, 3], ("1", "b"): [4, 5], ("2", "a"): [3, 4], ("2", "b"): [5, 6]}, sign=-1)
    assert found.verdict[1:] == [
        "size: a is ahead of b by 2 ± 0.000, 4 pairs.",
        "lr: 1 is ahead of 2 by 1 ± 0.000, 4 pairs.",
    ]


def test_a_key_without_an_effect_is_equal():
    found = grid({("1", "a"): [0.5, 0.6], ("1", "b"): [0.5, 0.6], ("2", "a"): [0.3, 0.1], ("2", "b"): [0.3, 0.1]})
    assert found.verdict[0] == "lr=1 size=a and lr=1 size=b have the best mean: 0.550, 2 seeds."
    assert found.verdict[2] == "size: a equals b in every pair, 4 pairs."


@pytest.mark.parametrize(
    "cells",
    [
        {("0.1", "1"): [0.5, 0.6], ("0.2", "2"): [0.3, 0.4], ("0.3", "3"): [0.1, 0.2]},  # a random search
        {("0.1", "1"): [0.5, 0.6], ("0.2", "1"): [0.3, 0.4]},  # one key
        {("0.1", "1"): [0.5], ("0.2", "1"): [0.3], ("0.1", "2"): [0.1]},  # a pair each
    ],
)
def test_what_is_no_grid_has_no_effects(cells):
    found = grid(cells)
    assert found.effects == [] and not any("pair" in sentence for sentence in found.verdict)


def test_against_plain_loops():
    draw = random.Random(0)
    for _ in range(20):
        choices = (("1", "2", "3"), ("a", "b"), ("x", "y", "z"))
        cells = {
            values: [draw.choice([None, draw.random(), draw.random()]) for _ in range(3)]
            for values in itertools.product(*choices)
        }
        for effect in grid(cells, keys=("k0", "k1", "k2")).effects:
            place = int(effect.key[1])
            for value, other in itertools.permutations(choices[place], 2):
                gains = []
                for values in cells:
                    twin = (*values[:place], other, *values[place + 1 :])
                    if values[place] == value:
                        pairs = zip(cells[values], cells[twin], strict=True)
                        gains += [mine - theirs for mine, theirs in pairs if None not in (mine, theirs)]
                found = effect.gains(value, other)
                low, high = ttest_1samp(gains, 0).confidence_interval(0.95)
                assert sorted(found) == pytest.approx(sorted(gains))
                assert (found.mean(), half_interval(found)) == pytest.approx(((low + high) / 2, (high - low) / 2))


@pytest.fixture
def summary(tmp_path, write_run):
    """A grid of two rates and two sizes in three seeds, of which one run has crashed and one has a reward of NaN."""
    for lr, size, seed in itertools.product((1e-3, 1e-4), (16, 8), range(3)):
        reward = {1e-3: 0.6, 1e-4: 0.4}[lr] + size / 100 + seed / 500
        lost = {(1e-3, 8, 0): None}.get((lr, size, seed), reward)
        config = f"seed: {seed}\nlr: {lr}\nsize: {size}\nenvs: {{math: {{}}}}\n"
        status = "crashed" if (lr, size, seed) == (1e-4, 8, 2) else "completed"
        lines = [{"step": 1, "reward/all/mean": reward}, {"step": 2, "reward/all/mean": lost}]
        write_run(
            tmp_path / f"lr={lr},size={size},seed={seed}",
            lines,
            config,
            {"status": status},
            f"- lr={lr}\n- size={size}\n",
        )
    return summarise([read_run(folder) for folder in find_runs([tmp_path])])


def test_the_tables_of_a_grid(summary):
    keys, heat, ranked, *_ = tables(summary)
    assert keys.head == ["key", "value", "runs", "training reward", "less the best, all else equal", "pairs"]
    # of 8 the pair of seed 0 has a NaN in the one, that of seed 2 has not completed in the other
    assert [row[:3] + row[-1:] for row in keys.rows] == [
        ["lr", "0.0001", "5", "4"],
        ["lr", "0.001", "5", "–"],
        ["size", "8", "4", "4"],
        ["size", "16", "6", "–"],
    ]
    assert [row[4] for row in keys.rows] == ["-0.200 ± 0.000", "–", "-0.080 ± 0.000", "–"]
    assert heat.title == "training reward by size and lr" and heat.head == ["size, lr:", "0.0001", "0.001"]
    # seeds 0 and 1: 0.480 and 0.482; seeds 1 and 2: 0.682 and 0.684
    assert heat.rows == [["8", "0.481 (2)", "0.683 (2)"], ["16", "0.562", "0.762"]]
    assert heat.shades == [[0, 0, round(DARKEST * 0.202 / 0.281)], [0, round(DARKEST * 0.081 / 0.281), DARKEST]]
    assert ranked.title == "Best first"
    assert summary.comparison.verdict[-2:] == [
        "Completed runs without a finite value of it are left out: lr=0.001 size=8 (1).",
        "Runs that have not completed are left out: lr=0.0001 size=8 (1).",
    ]


def test_values_stand_in_the_order_of_their_size(summary):
    assert list(summary.variants.members) == [("0.0001", "8"), ("0.0001", "16"), ("0.001", "8"), ("0.001", "16")]
    jobs = tables(summary)[-1]
    assert [row[1] for row in jobs.rows[::3]] == [
        "lr=0.0001, size=8",
        "lr=0.0001, size=16",
        "lr=0.001, size=8",
        "lr=0.001, size=16",
    ]
