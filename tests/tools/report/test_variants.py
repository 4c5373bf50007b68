"""Which runs differ in nothing but their seeds, and what tells the others apart."""

from pathlib import Path

import pandas as pd
import pytest

from prl.runs.result import RunResult
from prl.tools.report.runs import Run
from prl.tools.report.variants import in_order, seed_of, short_paths, variants


def run(name, config, overrides=(), searched=(), status="completed"):
    typed = {"overrides": list(overrides), "searched": list(searched)}
    result = RunResult(status=status)
    return Run(dir=Path("/sweep") / name, config=config, result=result, metrics=pd.DataFrame(), problems=[], **typed)


def grpo(seed, lr=0.001, **other):
    return {"seed": seed, "algo": {"_target_": "prl.GRPO", "length_penalty": None}, "optim": {"lr": lr}} | other


def max_rl(seed, lr=0.001):
    return {"seed": seed, "algo": {"_target_": "prl.MaxRL"}, "optim": {"lr": lr}}


def names(found):
    return {found.label(values): [run.dir.name for run in runs] for values, runs in found.members.items()}


def test_variants_are_called_by_what_was_typed():
    runs = [run(str(seed), grpo(seed), ["algo=grpo", f"seed={seed}"]) for seed in (0, 1)]
    found = variants([*runs, run("2", max_rl(0), ["algo=max_rl", "seed=0"])])
    assert names(found) == {"algo=grpo": ["0", "1"], "algo=max_rl": ["2"]}
    assert found.differences == {"algo._target_": ["prl.GRPO", "prl.MaxRL"], "algo.length_penalty": ["null", "–"]}


def test_what_one_job_of_a_sweep_typed_and_another_has_by_default_is_no_difference():
    """A sweep that was continued by another command."""
    first = run("0", grpo(0), ["algo=grpo", "seed=0"], searched=["algo"])
    assert names(variants([first, run("1", grpo(1), ["seed=1"])])) == {"all runs": ["0", "1"]}


def test_values_that_would_read_alike_are_told_apart():
    values = [("x, b=1", "q"), ("x", "1, b=q"), ("null", "q"), (None, "q")]
    found = variants([run(str(place), {"a": a, "b": b, "seed": 0}) for place, (a, b) in enumerate(values)])
    assert sorted(names(found).values()) == [["0"], ["1"], ["2"], ["3"]]


def test_config_that_differs_untyped_is_a_variant():
    found = variants([run("0", grpo(0)), run("1", grpo(0, lr=0.01)), run("2", grpo(1, lr=0.01))])
    assert names(found) == {"lr=0.001": ["0"], "lr=0.01": ["1", "2"]}


def test_as_few_columns_as_tell_the_variants_apart():
    runs = [
        run("0", grpo(0, 0.1), ["algo=grpo", "+optim.lr=0.1", "max=1"]),
        run("1", grpo(0, 0.2), ["algo=grpo", "+optim.lr=0.2", "max=2"]),
        run("2", max_rl(0, 0.1), ["algo=max_rl", "+optim.lr=0.1", "max=1"]),
        run("3", max_rl(0, 0.2), ["algo=max_rl", "max=2"]),
    ]
    assert variants(runs).columns == ["algo", "optim.lr"]
    assert list(variants(runs).members) == [("grpo", "0.1"), ("grpo", "0.2"), ("max_rl", "0.1"), ("max_rl", "0.2")]


@pytest.mark.parametrize(
    "values",
    [
        [(0.1, 1), (0.2, 2), (0.3, 3)],  # a random search: the rate alone tells them apart
        [(0.1, 1), (0.2, 1), (0.3, 1)],  # one value was tried
        [(0.1, 1), (0.1, 1), (0.2, 2)],
    ],
)
def test_all_that_a_search_varies_is_a_column(values):
    runs = [
        run(str(n), grpo(n, lr, max=most), [f"+optim.lr={lr}", f"seed={n}", f"max={most}", "algo=grpo"], searched=KEYS)
        for n, (lr, most) in enumerate(values)
    ]
    found = variants(runs)
    assert found.columns == ["optim.lr", "max", "algo"]
    assert [row[:2] for row in found.members] == [(str(lr), str(most)) for lr, most in dict.fromkeys(values)]
    assert {row[2] for row in found.members} == {"grpo"}, "a group's choice as it was typed"
    assert sum(len(group) for group in found.members.values()) == len(values)


KEYS = ["optim.lr", "seed", "max", "algo"]


def test_names_places_and_seeds_make_no_variant():
    def config(n):
        own = {"run": {"name": f"run{n}"}, "engine": {"port": n, "urls": [str(n)]}, "envs": {"math": {"seed": n}}}
        return grpo(n, **own)

    found = variants([run(str(n), config(n), [f"seed={n}", f"run.dir={n}", f"engine.urls=[{n}]"]) for n in (0, 1)])
    assert names(found) == {"all runs": ["0", "1"]}


def test_a_run_without_a_config_is_in_no_variant():
    refused = run("1", {}, ["algo=nonsense"], status="refused")
    found = variants([run("0", grpo(0)), refused])
    assert names(found) == {"all runs": ["0"]}
    assert (seed_of(refused), seed_of(run("0", grpo(4)))) == ("–", "4")
    assert variants([refused]).members == {}


def test_override_that_changes_nothing_is_no_column():
    runs = [run("0", grpo(0), ["typed=1"]), run("1", grpo(1)), run("2", grpo(0, 0.01))]
    assert variants(runs).columns == ["optim.lr"]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.00044296495704642936, 0.0006380556092044456, 0.001], ["0.000443", "0.0006381", "0.001"]),
        ([0.00044296495, 0.00044296496], ["0.00044296495", "0.00044296496"]),  # as many as there are
        ([123456789, 2.5], ["2.5", "123456789"]),
        (["1.2-34567", "3.45678e+"], ["1.2-34567", "3.45678e+"]),  # of the same signs, but no numbers
    ],
)
def test_long_numbers_have_four_digits(values, shown):
    found = variants([run(str(place), grpo(0, value)) for place, value in enumerate(values)])
    assert [value for (value,) in found.members] == shown


def test_runs_of_several_places_have_their_names():
    """Their length tells them apart as well, and says less than the rate that was typed."""
    runs = [
        run("base", grpo(0, max_steps=40), ["max_steps=40", "optim.lr=0.001", "debug=fast", "seed=0"]),
        run("base-again", grpo(1, max_steps=40), ["optim.lr=0.001", "max_steps=40", "seed=1"]),
        run("hot", grpo(0, 0.01, max_steps=60), ["optim.lr=0.01", "max_steps=60"]),
    ]
    found = variants(runs, named=True)
    assert names(found) == {
        "base+base-again (lr=0.001, max_steps=40)": ["base", "base-again"],
        "hot (lr=0.01, max_steps=60)": ["hot"],
    }
    assert names(variants(runs)) == {"lr=0.001": ["base", "base-again"], "lr=0.01": ["hot"]}


def test_equal_runs_of_one_seed_are_two_names():
    found = variants([run("before", grpo(0)), run("after", grpo(0))], named=True)
    assert names(found) == {"before": ["before"], "after": ["after"]}


def test_runs_of_one_name_are_told_apart_by_their_folders():
    """Two of one config and one seed are two; seeds of one variant stay one."""
    same = [run("c/same", grpo(0)), run("d/same", grpo(0))]
    assert names(variants(same, named=True)) == {"c/same": ["same"], "d/same": ["same"]}
    other = variants([same[0], run("d/same", grpo(0, 0.1))], named=True)
    assert list(names(other)) == ["c/same (lr=0.001)", "d/same (lr=0.1)"]
    assert names(variants([same[0], run("d/same", grpo(1))], named=True)) == {"c/same+d/same": ["same", "same"]}
    sweeps = [run(f"{place}/grid/0", grpo(0), ["optim.lr=0.001"], ["optim.lr"]) for place in "ab"]
    assert list(names(variants(sweeps, named=True))) == ["a/grid (lr=0.001)", "b/grid (lr=0.001)"]


def test_paths_are_as_short_as_tells_them_apart():
    paths = [Path(path) for path in ("/a/b", "/x/a/b", "/c", "/c")]
    assert short_paths(paths) == ["/a/b", "x/a/b", "c", "c"]


def test_jobs_of_a_sweep_have_its_name():
    jobs = [
        run(f"{sweep}/lr={lr}", grpo(0, lr), [f"optim.lr={lr}"], ["optim.lr"]) for sweep in "ab" for lr in (0.1, 0.2)
    ]
    assert list(names(variants(jobs, named=True))) == ["a (lr=0.1)", "a (lr=0.2)", "b (lr=0.1)", "b (lr=0.2)"]


@pytest.mark.parametrize(
    ("values", "ordered"),
    [
        (["10", "9", "1e-05", "0.0001", "9"], ["1e-05", "0.0001", "9", "10"]),
        (["null", "2", "-1", "b", "a"], ["-1", "2", "null", "b", "a"]),
        (["nan", "inf", "3"], ["3", "nan", "inf"]),
    ],
)
def test_numbers_are_ordered_by_their_size(values, ordered):
    assert in_order(values) == ordered
