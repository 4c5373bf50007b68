"""Runs added up, against numbers worked out by hand."""

import math

import pytest

from prl.tools.report.runs import find_runs, read_run
from prl.tools.report.summary import summarise
from prl.tools.report.sweep import panels
from prl.tools.report.tables import Table, markdown, tables

EVAL = "eval/m/avg@1"
T3 = 3.182446
"""97.5 % quantile of Student's t with three degrees of freedom, from a printed table."""


@pytest.fixture
def runs(sweep):
    return [read_run(folder) for folder in find_runs([sweep])]


def test_each_run_has_its_numbers(runs):
    summary = summarise(runs, threshold=0.6)
    assert summary.metrics == [EVAL, "reward/all/mean"]
    rows = summary.table.set_index(["metric", "run"])
    assert len(rows) == 8  # the refused job has no config
    first = rows.loc[EVAL, str(runs[0].dir)]
    # four steps of 10 tokens and 2 seconds
    assert first[["variant", "seed", "status"]].tolist() == ["lr=0.1", "0", "completed"]
    assert first[["final", "highest"]].tolist() == [0.6, 0.6]
    assert first[["steps", "tokens", "seconds"]].tolist() == [4, 40, 8]
    crashed = rows.loc[EVAL, str(runs[3].dir)]
    assert crashed[["status", "final", "steps", "tokens"]].tolist() == ["crashed", 0.9, 2, 20]
    reward = rows.loc["reward/all/mean", str(runs[0].dir)]
    # 0.3 and 0.4 at the last two steps
    assert reward[["final", "highest"]].tolist() == pytest.approx([0.35, 0.4])


def test_without_a_threshold_nothing_is_counted_to_it(runs):
    time, reward = tables(summarise(runs, ["time/step", "reward/*"]))[1:3]
    assert time.head == reward.head == ["lr", "runs", "final", "highest"]
    assert time.rows[0] == ["0.1", "2", "2 (2 to 2)", "2 (2 to 2)"]


def test_metrics_are_chosen_by_pattern(runs):
    assert summarise(runs, ["tokens/*", "time/step"]).metrics == ["tokens/generated", "time/step"]


def test_runs_with_other_metrics_or_none(tmp_path, write_run):
    done = {"status": "completed"}
    write_run(tmp_path / "a", [{"step": 1, EVAL: 0.5}], result=done)
    write_run(tmp_path / "b", [{"step": 1, "eval/other/avg@4": 0.25}], "seed: 1\n", result=done)
    summary = summarise([read_run(tmp_path / name) for name in "ab"])
    assert summary.metrics == [EVAL, "eval/other/avg@4"]
    of_a = next(table for table in tables(summary) if table.title == EVAL)
    assert of_a.rows == [["2", "0.500 (1 of 2)", "0.500 (1 of 2)"]]
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    empty = summarise([read_run(tmp_path / "a")])
    assert empty.metrics == [] and [table.title for table in tables(empty)] == ["Jobs"]


def test_the_tables(runs):
    compared, evals, rewards, differs, jobs = tables(summarise(runs, threshold=0.7))
    assert (compared.title, compared.head) == ("Best first", ["lr", "seeds", "held-out reward"])
    assert compared.rows == [["0.1", "2", "0.700 (0.600 to 0.800)"], ["0.2", "1", "0.500"]]
    assert (evals.title, rewards.title) == (EVAL, "reward/all/mean")
    assert evals.head[:4] == ["lr", "runs", "final", "highest"] and evals.head[4] == "steps to 0.700"
    of_both = [
        "0.1",
        "2",
        "0.700 (0.600 to 0.800)",
        "0.700 (0.600 to 0.800)",
        "4 (1 of 2)",
        "40 (1 of 2)",
        "8 (1 of 2)",
    ]
    of_one = ["0.2", "1 completed, 1 crashed", "0.500", "0.500", "0 of 1", "0 of 1", "0 of 1"]
    assert evals.rows == [of_both, of_one]
    assert (differs.head, differs.rows) == (["config key", "lr=0.1", "lr=0.2"], [["optim.lr", "0.1", "0.2"]])
    assert jobs.rows[3] == ["3-lr=0.2,seed=1", "lr=0.2", "1", "crashed", "2", "–", "0.900", "0.150", ""]
    assert jobs.rows[4] == ["4-lr=<b>|x", "–", "–", "refused", "0", "–", "–", "–", "optim.lr=<b>|x is not a number"]


def test_markdown_keeps_its_columns(runs):
    lines = markdown(tables(summarise(runs))[-1]).splitlines()
    assert lines[0] == "## Jobs" and lines[3] == "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |"
    assert lines[8] == "| 4-lr=&lt;b>\\|x | – | – | refused | 0 | – | – | – | optim.lr=&lt;b>\\|x is not a number |"


def seeded(folder, write_run, finals):
    """Completed runs, one for each (seed, final); without the metric where that is None."""
    for place, (seed, final) in enumerate(finals):
        lines = [{"step": 1, "time/step": 1} | ({} if final is None else {EVAL: final})]
        write_run(folder / str(place), lines, f"seed: {seed}\n", {"status": "completed"})
    return summarise([read_run(folder / str(place)) for place in range(len(finals))], [EVAL], threshold=0.5)


def test_runs_of_one_seed_are_one_of_the_seeds(tmp_path, write_run):
    summary = seeded(tmp_path / "one", write_run, [(0, 0.746)] * 6)
    assert tables(summary)[1].rows[0][:2] == ["6 (1 seed)", "0.746"]
    summary = seeded(tmp_path / "two", write_run, [(0, 0.5), (0, 0.7), (1, 0.8)])
    assert tables(summary)[1].rows[0][:2] == ["3 (2 seeds)", "0.700 (0.600 to 0.800)"]
    [chart] = panels(summary)
    assert chart.series["all runs"][1] == pytest.approx(0.7)
    assert chart.bands["all runs"][1][1] == pytest.approx(0.8)
    assert [curve[1] for curve in chart.thin["all runs"]] == pytest.approx([0.6, 0.8])


def test_from_four_seeds_on_there_is_an_interval(tmp_path, write_run):
    summary = seeded(tmp_path, write_run, [(0, 0.2), (1, 0.4), (2, 0.6), (3, 0.8), (4, None)])
    # standard deviation sqrt(0.2 / 3), standard error half of it
    half = T3 * math.sqrt(0.2 / 3) / 2
    assert tables(summary)[1].rows[0][:2] == ["5", f"0.500 ± {half:.3f} (4 of 5)"]
    [chart] = panels(summary)
    assert chart.bands["all runs"][1][1] == pytest.approx(0.5 + half, rel=1e-6) and chart.thin["all runs"] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("![x](http://evil/x.png)", "!\\[x\\](http://evil/x.png)"),
        ("<b>&amp; a|b\\|c `d`", "&lt;b>&amp;amp; a\\|b\\\\\\|c \\`d\\`"),
        ("**a** _b_ ~~d~~ max_steps", "\\*\\*a\\*\\* \\_b\\_ \\~\\~d\\~\\~ max_steps"),
        ("\x1b[31m\n# no", "\\\\x1b\\[31m # no"),
    ],
)
def test_text_of_a_run_is_no_markup_in_markdown(text, shown):
    table = Table(title=text, head=[text], rows=[[text]])
    assert markdown(table).splitlines() == [f"## {shown}", "", f"| {shown} |", "| --- |", f"| {shown} |"]
