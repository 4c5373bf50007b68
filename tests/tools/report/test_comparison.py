"""Which variant is ahead: sentences against numbers worked out by hand, and an interval against SciPy's paired test."""

import math

import pandas as pd
import pytest
from scipy.stats import ttest_rel

from prl.tools.report.comparison import LISTED, Comparison, compare
from prl.tools.report.runs import read_run
from prl.tools.report.summary import summarise
from prl.tools.report.sweep import panels, scatters
from prl.tools.report.tables import tables
from prl.tools.report.variants import variants

GRPO, MAX_RL = "algo=grpo", "algo=max_rl"


def verdict(sign=1, **columns):
    """The verdict on variants whose values by seed are given, best first; None: that seed has not completed."""
    return Comparison("reward", sign, pd.DataFrame(columns, dtype=float)).verdict


def test_the_interval_is_that_of_the_differences_by_seed():
    base = [0.1, 0.9, 0.4, 0.7, 0.2]
    ahead = [value + gain for value, gain in zip(base, [0.02, 0.04, 0.06, 0.04, 0.04], strict=True)]
    # differences: mean 0.04, standard deviation sqrt(2 * 0.02**2 / 4); 97.5 % quantile of t with 4 degrees: 2.776445
    half = 2.776445 * math.sqrt(2 * 0.02**2 / 4) / math.sqrt(5)
    low, high = ttest_rel(ahead, base).confidence_interval(0.95)
    assert ((low + high) / 2, (high - low) / 2) == (pytest.approx(0.04), pytest.approx(half, rel=1e-6))
    assert verdict(a=ahead, b=base) == [f"a is ahead of b by 0.040 ± {half:.3f}, 5 seeds."]


@pytest.mark.parametrize(
    ("columns", "sentences"),
    [
        # differences 0, 0.03, 0: mean 0.01, standard error 0.01, quantile with 2 degrees 4.302653
        ({"a": [0.5, 0.53, 0.5], "b": [0.5, 0.5, 0.5]}, ["a can't be told apart from b: +0.010 ± 0.043, 3 seeds."]),
        (
            {"a": [0.5, 0.6], "b": [0.5, 0.6]},
            ["a equals b in every seed, 2 seeds."],
        ),
        # differences 0.1 and -0.1: standard error 0.1, quantile with 1 degree 12.706205
        (
            {"a": [0.5, 0.6], "b": [0.4, 0.7]},
            [
                "a ties with b: the means are equal, the difference is 0 ± 1.271, 2 seeds.",
            ],
        ),
        (
            {"a": [0.5], "b": [0.5], "c": [0.4]},
            ["a and b are best: 0.500, 1 seed. One seed shows no spread: run each with seed=0,1,2."],
        ),
        (
            {"a": [0.5, 0.6], "b": [0.5, 0.6], "c": [0.4, 0.5]},
            [
                "a and b have the best mean: 0.550, 2 seeds.",
                "a equals b in every seed, 2 seeds.",
                "a is ahead of c by 0.100 ± 0.000, 2 seeds.",
            ],
        ),
        # ahead by a seed that the other lacks, behind in those that both have
        (
            {"a": [0.1, 0.2, 0.3, 5], "b": [0.2, 0.3, 0.4, None]},
            ["a is behind b by 0.100 ± 0.000, 3 seeds."],
        ),
        ({"a": [0.5, None], "b": [None, 0.4]}, ["a has 0 seeds in common with b: run both with seed=0,1,2."]),
        ({"a": [0.5, 0.6], "b": [None, 0.4]}, ["a has 1 seed in common with b: run both with seed=0,1,2."]),
        ({"a": [0.5], "b": [0.4]}, ["a is best: 0.500, 1 seed. One seed shows no spread: run each with seed=0,1,2."]),
        ({"a": [0.5, 0.7]}, ["One variant, nothing to compare: 0.600, 2 seeds."]),
        ({}, ["Nothing to compare: no run has completed with this metric."]),
        (
            {"a": [0.5, 0.7], "b": [0.4, 0.6], "c": [0.1, None]},
            [
                "a has the best mean: 0.600, 2 seeds.",
                "It is ahead of b by 0.100 ± 0.000, 2 seeds.",
                "It has 1 seed in common with c: run both with seed=0,1,2.",
            ],
        ),
    ],
)
def test_what_is_said(columns, sentences):
    assert verdict(**columns) == sentences


def test_variants_with_other_envs_are_not_compared():
    values = pd.DataFrame({"a": [0.9, 0.8], "b": [0.5, 0.4], "c": [0.2, 0.2], "d": [None, 0.1]})
    found = Comparison("reward", 1, values, {"a": "guess", "b": "math", "c": "math", "d": "maze, math"})
    assert found.verdict == [
        "guess: One variant, nothing to compare: 0.850, 2 seeds.",
        "math: b can't be told apart from c: +0.250 ± 0.635, 2 seeds.",
        "maze, math: One variant, nothing to compare: 0.100, 1 seed.",
    ]


def test_variants_are_ranked_among_those_with_the_same_envs(tmp_path, write_run):
    results = {("guess", 0.1): 0.2, ("math", 0.1): 0.9, ("guess", 0.2): 0.4, ("math", 0.2): 0.8}
    for (env, lr), reward in results.items():
        config = f"seed: 0\nenvs: {{{env}: {{}}}}\nlr: {lr}\nenv: {env}\n"
        write_run(tmp_path / f"{env}-{lr}", [{"step": 1, "reward/all/mean": reward}], config, {"status": "completed"})
    summary = summarise([read_run(folder) for folder in sorted(tmp_path.iterdir())])
    table = tables(summary)[0]
    assert table.title == "Best first, envs by envs"
    assert [row[-1] for row in table.rows] == ["0.400", "0.200", "0.900", "0.800"]
    assert all(sorted(chart.series["best"]) == [0.4, 0.9] for chart in scatters(summary))


def test_a_variant_that_lacks_seeds_may_have_a_better_mean():
    first, *rest = verdict(a=[0.5, 0.51, 0.52], c=[0.41, 0.42, 0.43], b=[0.9, 0.91, None])
    assert first == "a has the best mean of those with most seeds: 0.510, 3 seeds."
    assert rest[-1] == "It is behind b by 0.400 ± 0.000, 2 seeds."
    assert verdict(a=[0.5, 0.51], b=[0.9, None])[0] == "a has the best mean of those with most seeds: 0.505, 2 seeds."


def test_runs_that_have_not_completed_are_named(tmp_path, write_run):
    ended = {("a", 0): "completed", ("a", 1): "completed", ("b", 0): "completed", ("b", 1): "crashed"}
    for (name, seed), status in (ended | {("c", 0): "failed", ("c", 1): "stopped"}).items():
        lines = [{"step": 1, "reward/all/mean": 0.5}]
        write_run(tmp_path / f"{name}{seed}", lines, f"seed: {seed}\nname: {name}\n", {"status": status})
    found = compare(variants([read_run(folder) for folder in sorted(tmp_path.iterdir())]))
    assert found.verdict[-1] == "Runs that have not completed are left out: b (1), c (2)."


def test_less_can_be_better():
    assert verdict(-1, a=[0.1, 0.2], b=[0.4, 0.5]) == ["a is ahead of b by 0.300 ± 0.000, 2 seeds."]


def test_variants_are_named_as_they_were_typed():
    names = {"algo=max_rl": [2, 2], "lr=0.1": [1, 1], "algo=grpo, lr=0.1": [0, 0]}
    assert verdict(**{"lora=null": [2, 2], "strict=true": [1, 1]})[0].startswith("lora=null is ahead of strict=true by")
    first, second, third = verdict(**names)
    assert first.startswith("max_rl has the best mean")
    assert second.startswith("It is ahead of lr=0.1 by") and third.startswith("It is ahead of algo=grpo lr=0.1 by")


def test_of_many_variants_the_nearest_are_named():
    found = verdict(**{f"a{place}": [-place, -place] for place in range(20)})
    assert len(found) == 2 + LISTED and found[-2].startswith(f"It is ahead of a{LISTED} by")
    assert found[-1] == f"The table has {19 - LISTED} more."


@pytest.fixture
def runs(tmp_path, write_run):
    """`runs(options)`: two variants of two seeds, whose config has these options of `optimized_metric`."""

    def write(options="{}", held_out=("eval/a/avg@1", "eval/b/avg@1")):
        for seed, lr, reward, loss in ((0, 0.1, 0.5, 2.0), (0, 0.2, 0.7, 4.0), (1, 0.1, 0.6, 2.5), (1, 0.2, 0.7, 4.5)):
            lines = [{"step": 0} | dict.fromkeys(held_out, 0.9)]
            lines += [{"step": step, "loss/mean": loss, "reward/all/mean": reward - 0.4} for step in (1, 2, 3)]
            for step, add in ((2, -0.2), (3, 0.0)):
                lines[step] |= dict(zip(held_out, (reward + add, reward + add + 0.1), strict=False))
            config = f"seed: {seed}\nenvs: {{a: {{}}, b: {{}}}}\noptim: {{lr: {lr}}}\noptimized_metric: {options}\n"
            write_run(tmp_path / f"{lr}-{seed}", lines, config, {"status": "completed"})
        return variants([read_run(folder) for folder in sorted(tmp_path.iterdir())])

    return write


def test_without_a_key_variants_are_compared_by_the_held_out_reward(runs):
    found = compare(runs())
    assert (found.metric, found.sign, list(found.values)) == ("held-out reward", 1, ["lr=0.2", "lr=0.1"])
    assert found.envs == {"lr=0.1": "a, b", "lr=0.2": "a, b"}
    # the mean of both envs and of the last two evaluations: reward - 0.1 + 0.05
    assert found.values["lr=0.1"].to_dict() == pytest.approx({"0": 0.45, "1": 0.55})


def test_without_an_evaluation_they_are_compared_by_the_reward_in_training(runs):
    found = compare(runs(held_out=()))
    assert found.metric == "training reward"
    assert found.values["lr=0.2"].to_dict() == pytest.approx({"0": 0.3, "1": 0.3})


def test_the_metric_is_the_one_that_was_optimised_or_asked_for(runs):
    found = compare(runs("{key: loss/mean, direction: minimize, last: 1}"))
    assert (found.metric, found.sign, list(found.values)) == ("loss/mean", -1, ["lr=0.1", "lr=0.2"])
    assert found.values["lr=0.1"].to_dict() == {"0": 2, "1": 2.5}
    assert compare(runs(), ["eval/b/avg@*"]).values["lr=0.1"].to_dict() == pytest.approx({"0": 0.5, "1": 0.6})
    assert compare(runs(), ["loss/mean"]).metric == "held-out reward", "nothing says whether more loss is better"
    assert compare(runs("{key: nothing}")).values.empty
    found = compare(runs("{key: loss/mean, direction: minimize}"), ["reward/all/mean"])
    assert (found.metric, found.sign) == ("training reward", 1), "the direction is that of its own key"


def test_a_run_without_the_metric_is_not_left_out_in_silence(tmp_path, write_run):
    for place, (seed, reward) in enumerate([(0, 0.2), (1, 0.4), (2, None)]):
        lines = [{"step": 1, "reward/all/mean": reward}]
        write_run(tmp_path / str(place), lines, f"seed: {seed}\n", {"status": "completed"})
    found = compare(variants([read_run(tmp_path / str(place)) for place in range(3)]))
    assert found.verdict == [
        "One variant, nothing to compare: 0.300, 2 seeds.",
        "Completed runs without a finite value of it are left out: all runs (1).",
    ]


def test_where_few_have_evaluations_the_metric_that_more_have_is_named(tmp_path, write_run):
    for lr in range(3):
        lines = [{"step": 1, "reward/all/mean": lr / 10} | ({"eval/m/avg@1": 0.7} if lr == 0 else {})]
        write_run(tmp_path / str(lr), lines, f"seed: 0\nlr: {lr}\n", {"status": "completed"})
    found = variants([read_run(tmp_path / str(lr)) for lr in range(3)])
    assert compare(found).verdict == [
        "One variant, nothing to compare: 0.700, 1 seed.",
        "Completed runs without a finite value of it are left out: lr=1 (1), lr=2 (1).",
        "To compare more of them: prl report … --metric reward/all/mean.",
    ]
    assert compare(found, ["reward/all/mean"]).verdict == [
        "lr=2 is best: 0.200, 1 seed. One seed shows no spread: run each with seed=0,1,2."
    ]


def test_a_variant_that_lacks_seeds_is_not_the_best(tmp_path, write_run):
    """One lucky seed says less than three."""
    for place, (lr, seed, reward) in enumerate([(1, 0, 0.9), (2, 0, 0.95), (2, 1, 0.5), (2, 2, 0.4)]):
        lines = [{"step": 1, "reward/all/mean": reward}]
        write_run(tmp_path / str(place), lines, f"seed: {seed}\nlr: {lr}\n", {"status": "completed"})
    found = compare(variants([read_run(tmp_path / str(place)) for place in range(4)]))
    assert list(found.values) == ["lr=2", "lr=1"]


def test_runs_of_one_seed_are_one_of_the_seeds(tmp_path, write_run):
    for place, (seed, reward) in enumerate([(0, 0.2), (0, 0.4), (1, 0.5)]):
        lines = [{"step": 1, "reward/all/mean": reward}]
        write_run(tmp_path / str(place), lines, f"seed: {seed}\n", {"status": "completed"})
    found = compare(variants([read_run(tmp_path / str(place)) for place in range(3)]))
    assert found.values["all runs"].to_dict() == pytest.approx({"0": 0.3, "1": 0.5})


@pytest.fixture
def arms(tmp_path, write_run):
    """`arms(held_out)`: two seeds of grpo and of sft on demonstrations, with a held-out reward or without."""

    def write(held_out):
        for name, source, seed in ((name, source, seed) for name, source in SOURCES.items() for seed in (0, 1)):
            lines = [{"step": 1, "reward/all/mean": 0.9 if name == "sft" else 0.2 + seed / 10}]
            lines[0] |= {"eval/m/avg@1": 0.4} if held_out else {}
            algo = f"{{_target_: prl.{name}, sampling: {{source: {source}}}}}"
            config = f"seed: {seed}\nenvs: {{m: {{weight: 1}}}}\nalgo: {algo}\n"
            write_run(tmp_path / f"{name}{seed}", lines, config, {"status": "completed"}, f"- algo={name}\n")
        return summarise([read_run(folder) for folder in sorted(tmp_path.iterdir())])

    return write


SOURCES = {"grpo": "policy", "sft": "demonstrations"}


def test_nobody_is_ranked_by_the_rewards_of_a_teacher(arms):
    summary = arms(held_out=False)
    assert list(summary.comparison.values) == ["algo=grpo"]
    assert summary.comparison.verdict == [
        "One variant, nothing to compare: 0.250, 2 seeds.",
        "sft is left out: its rewards in training are those of demonstrations, not the policy's. Evaluate it "
        "(orchestrator.eval.every=5).",
    ]
    measured = next(table for table in tables(summary) if table.title == "reward/all/mean")
    assert [row[1] for row in measured.rows] == ["2", "2, rewards of demonstrations"]
    [chart] = panels(summary)
    assert [len(series) for series in chart.series.values()] == [1, 0] and chart.y[1] < 0.9


def test_imitation_is_ranked_by_its_held_out_reward(arms):
    found = arms(held_out=True).comparison
    assert found.metric == "held-out reward" and found.verdict == ["grpo equals sft in every seed, 2 seeds."]
