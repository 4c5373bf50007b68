"""The files of a summary, and the command that writes them."""

import json
import re
import xml.dom.minidom
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

import prl
from prl.runs.owner import owned
from prl.tools.report.__main__ import main
from prl.tools.report.runs import find_runs, read_run
from prl.tools.report.summary import summarise
from prl.tools.report.sweep import _is_log, panels, scatters, searches, title, write_summary
from prl.tools.report.tables import markdown, tables

EVAL = "eval/m/avg@1"


@pytest.fixture
def refuse_pages(monkeypatch):
    """Runs get no page of their own here: it has its own tests."""
    monkeypatch.setattr("prl.tools.report.sweep.try_to_write", lambda folder: None)


def test_the_files_of_a_sweep(sweep, refuse_pages, capsys):
    (sweep / "0-lr=0.1,seed=0" / "report.html").touch()
    assert main([str(sweep), "--threshold", "0.7"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"0\.1 +2 +0\.700 \(0\.600 to 0\.800\)", printed)
    assert printed.splitlines()[-1] == f"{sweep}/summary.html"
    text = (sweep / "summary.md").read_text()
    assert text.startswith("# sweep: 5 runs (3 completed, 1 crashed, 1 refused), 2 variants\n")
    verdict = "lr=0.1 has 1 seed in common with lr=0.2: run both with seed=0,1,2."
    assert f"## Verdict: held-out reward\n\n- {verdict}\n" in text
    assert "95 % t interval" in text and "| 0.1 | 2 | 0.700 (0.600 to 0.800) |" in text
    assert "| 3-lr=0.2,seed=1 | lr=0.2 | 1 | crashed | 2 |" in text
    table = pd.read_csv(sweep / "summary.csv")
    assert len(table) == 8 and table["final"].tolist()[:4] == [0.6, 0.8, 0.5, 0.9]
    assert list(table)[:4] == ["metric", "variant", "run", "seed"]
    assert table["variant"].tolist() == ["lr=0.1", "lr=0.1", "lr=0.2", "lr=0.2"] * 2
    assert table["run"].tolist()[:2] == ["0-lr=0.1,seed=0", "1-lr=0.1,seed=1"]
    assert (sweep / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    html = (sweep / "summary.html").read_text()
    assert '<a href="0-lr%3D0.1%2Cseed%3D0/report.html">0-lr=0.1,seed=0</a>' in html and html.count("<a ") == 1
    assert "4-lr=&lt;b&gt;|x" in html and "<b>" not in html
    assert "default-src 'none'" in html and "<script" not in html and " style=" not in html
    assert html.count('<img src="data:image/svg+xml;base64,') == 3, "two metrics, and the rate"
    assert f'<p class="verdict">{verdict}</p>' in html


def test_chart_has_lines_of_variants_and_incomplete_runs(sweep):
    chart, _ = panels(summarise([read_run(folder) for folder in find_runs([sweep])]))
    assert {label: values.to_dict() for label, values in chart.series.items()} == {
        "lr=0.1": pytest.approx({0: 0.2, 4: 0.7}),
        "lr=0.2": {0: 0.2, 4: 0.5},
    }
    low, high = chart.bands["lr=0.1"]
    assert (low[4], high[4]) == (0.6, 0.8)
    assert [values.to_dict() for values in chart.thin["lr=0.1"]] == [{0: 0.2, 4: 0.6}, {0: 0.2, 4: 0.8}]
    assert chart.thin["lr=0.2"] == []
    assert [[values.to_dict() for values in single] for single in chart.single.values()] == [[], [{0: 0.2, 2: 0.9}]]
    assert chart.y == pytest.approx((0.2 - 0.042, 0.9 + 0.042))
    axes = Figure().add_subplot()
    chart.draw(axes)
    assert [line.get_linestyle() for line in axes.lines] == ["-", "-", "-", "-", "--"]


def test_what_is_compared_is_drawn_over_each_key(tmp_path, write_run):
    for place, (lr, loss, reward) in enumerate([(1e-4, "my_$x^{", 0.1), (1e-2, "my_ipo", 0.9), (1e-3, "my_ipo", 0.2)]):
        for seed in (0, 1):
            lines, config = [{"step": 1, "reward/all/mean": reward + seed}], f"seed: {seed}\nlr: {lr}\nloss: {loss}\n"
            write_run(
                tmp_path / f"{place}-{seed}", lines, config, {"status": "completed"}, f"- lr={lr}\n- loss={loss}\n"
            )
    runs = [replace(read_run(folder), searched=["lr", "loss"]) for folder in find_runs([tmp_path])]
    rate, loss = scatters(summarise(runs))
    assert (rate.title, rate.scatter, loss.scatter) == ("training reward by lr", "log", "linear")
    assert rate.ticks == {1e-4: "0.0001", 1e-3: "0.001", 1e-2: "0.01"}
    others = {(x, y) for x, y in rate.series["others"].items()}
    assert others == {(1e-4, 0.1), (1e-4, 1.1), (1e-3, 0.2), (1e-3, 1.2)}
    assert list(loss.series["best"].items()) == [(1, 0.9), (1, 1.9)] and loss.ticks == {0: "$x^{", 1: "ipo"}
    for chart in (rate, loss):
        axes = Figure().add_subplot()
        chart.draw(axes)
        assert chart.source().startswith("data:image/svg"), "names are no formulas"
        assert axes.get_xscale() == chart.scatter and [line.get_linestyle() for line in axes.lines] == ["None"] * 2


def test_a_table_does_not_say_where_prl_is_installed(tmp_path, write_run):
    for name in ("tiny", "tiny-teacher"):
        config = f"model: {{path: {Path(prl.__file__).parent}/models/{name}}}\n"
        write_run(tmp_path / name, [{"step": 1, "reward/all/mean": 0.5}], config)
    text = "".join(map(markdown, tables(summarise([read_run(folder) for folder in find_runs([tmp_path])]))))
    assert "| model.path | prl/models/tiny | prl/models/tiny-teacher |" in text


def test_nothing_to_draw_is_a_summary_without_curves(tmp_path, write_run, refuse_pages):
    write_run(tmp_path / "a")
    assert main([str(tmp_path / "a"), str(tmp_path / "a"), "--out", str(tmp_path)]) == 0
    assert not (tmp_path / "curves.png").exists() and "<img" not in (tmp_path / "summary.html").read_text()


def test_a_sweep_of_which_no_job_completed_has_a_summary(sweep, refuse_pages):
    for result in sweep.glob("[0-3]*/result.json"):
        result.unlink()
    assert main([str(sweep)]) == 0
    assert "Nothing to compare: no run has completed" in (sweep / "summary.md").read_text()
    assert (sweep / "summary.html").read_text().count("<img") == 2, "the crashed runs' curves, and no points"


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["nowhere"], "there is no folder nowhere$"),
        (["sweep", "nowhere", "x/none"], "there is no folder nowhere, x/none$"),
        (["sweep", "sweep"], "say with --out"),
        (["sweep", "--metric", "loss"], "--metric loss: no run has recorded it"),
        (["sweep/0-lr=0.1,seed=0", "--threshold", "1"], "is one run: its page takes no"),
    ],
)
def test_what_cannot_be_reported_is_refused(sweep, refuse_pages, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(sweep.parent)
    assert main(arguments) == 2
    assert re.search(f"^error: .*{says}", capsys.readouterr().err)
    assert not (sweep / "summary.md").exists()


def test_runs_get_their_pages(tmp_path, write_run):
    """A run that still runs gets a new one, one that has ended only where it has none."""
    for name in ("done", "crashed", "running"):
        write_run(tmp_path / name, result={"status": "completed"} if name == "done" else None)
        if name != "crashed":
            (tmp_path / name / "report.html").touch()
    with owned(tmp_path / "running"):
        write_summary(tmp_path)
    written = {name: (tmp_path / name / "report.html").stat().st_size > 0 for name in ("done", "crashed", "running")}
    assert written == {"done": False, "crashed": True, "running": True}


@pytest.mark.parametrize(
    ("key", "values", "scale"),
    [
        ("trainer.optim.lr", (1e-4, 3e-4), "log"),
        ("trainer.optim.lr", (1e-4, 2e-4), "linear"),
        ("group_size", (4, 8, 16), "log"),
        ("beta", (0.1, 0.5, 1.0), "linear"),
        ("beta", (0, 10, 1000), "linear"),
        ("beta", (-1, 10, 1000), "linear"),
    ],
)
def test_rates_have_a_logarithmic_axis(key, values, scale):
    assert _is_log(key, pd.Series(values)) == (scale == "log")


def test_a_search_shows_the_best_so_far(tmp_path, write_run, refuse_pages):
    rewards = {0.3: 0.2, 0.1: 0.5, 0.2: 0.4, 0.4: 0.7}  # by rate, in the order in which they were tried
    for place, (lr, reward) in enumerate(rewards.items()):
        for seed in (0, 1):
            lines, config = [{"step": 1, "reward/all/mean": reward + seed / 10}], f"seed: {seed}\nlr: {lr}\n"
            folder = write_run(tmp_path / f"lr={lr},seed={seed}", lines, config, {"status": "completed"})
            (folder / "provenance.json").write_text(json.dumps({"started": f"2026-11-29T0{place}:00:0{seed}+00:00"}))
    runs = [read_run(folder) for folder in find_runs([tmp_path])]
    assert scatters(summarise(runs))[0].ticks == {0.1: "0.1", 0.2: "0.2", 0.3: "0.3", 0.4: "0.4"}
    assert searches(summarise(runs)) == [], "a grid"
    (tmp_path / "study.db").touch()
    [chart] = searches(summarise(runs))
    assert chart.series[""].to_dict() == pytest.approx({1: 0.25, 2: 0.55, 3: 0.45, 4: 0.75})
    assert chart.line.to_dict() == pytest.approx({1: 0.25, 2: 0.55, 3: 0.55, 4: 0.75})
    axes = Figure().add_subplot()
    chart.draw(axes)
    assert [len(line.get_xdata()) for line in axes.lines] == [4, 4]
    write_summary(tmp_path)
    assert "by trial, and the best so far" in (tmp_path / "summary.html").read_text()


def test_pictures_for_papers(sweep, refuse_pages):
    write_summary(sweep)
    pdf, svg = (sweep / "curves.pdf").read_bytes(), (sweep / "curves.svg").read_text()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf, "its fonts are in it"
    assert "<svg " in svg and 'width="241.2pt"' in svg and b"/MediaBox [ 0 0 241.2 " in pdf, "3.35 inches, a column"
    assert ">reward/all/mean</text>" in svg and ">lr=0.1</text>" in svg
    xml.dom.minidom.parseString(svg)


def test_a_hostile_name_is_text_in_a_picture(tmp_path, write_run, refuse_pages):
    for name in ("a", "b"):
        config = f'seed: 0\nname: "$x^{{{name} <b>\\e[31m"\n'
        write_run(tmp_path / name, [{"step": 1, "reward/all/mean": 0.5}], config, {"status": "completed"})
    write_summary(tmp_path / "a", tmp_path / "b", out=tmp_path)
    svg = (tmp_path / "curves.svg").read_text()
    xml.dom.minidom.parseString(svg)
    assert "\\x1b[31m" in svg and "\x1b" not in svg and "<b>" not in svg


def test_runs_of_several_places_are_drawn_by_name(tmp_path, write_run, refuse_pages):
    """A fork from its source's beginning, a run that has crashed as far as it came."""
    base = write_run(tmp_path / "x" / "base", steps(1, 5), "seed: 0\n", {"status": "completed"})
    fork = write_run(tmp_path / "y" / "fork", steps(4, 7), "seed: 0\nlr: 2\n", {"status": "completed"})
    checkpoint = base / "checkpoints" / "step_000003"
    (fork / "resumes.jsonl").write_text(json.dumps({"step": 3, "checkpoint": str(checkpoint)}) + "\n")
    write_run(tmp_path / "y" / "died", steps(1, 3), "seed: 0\nlr: 3\n")
    places = [tmp_path / "x" / "base", tmp_path / "y" / "fork", tmp_path / "y" / "died"]
    summary = write_summary(*places, out=tmp_path)
    [chart] = panels(summary)
    assert {label: list(series.index) for label, series in chart.series.items() if len(series)} == {
        "base (lr=–)": [1, 2, 3, 4, 5],
        "fork (lr=2)": [1, 2, 3, 4, 5, 6, 7],
    }
    assert [list(curve.index) for curve in chart.single["died (lr=3)"]] == [[1, 2, 3]]


def test_runs_of_one_name_in_two_places_are_not_averaged(tmp_path, write_run, refuse_pages):
    done = {"status": "completed"}
    places = [write_run(tmp_path / place / "same", steps(1, 2), "seed: 0\n", done) for place in "cd"]
    summary = write_summary(*places, out=tmp_path)
    assert {label: len(column) for label, column in summary.comparison.values.items()} == {"c/same": 1, "d/same": 1}
    assert title(summary, places) == "c/same, d/same: 2 runs (2 completed), 2 variants"


def steps(first, last):
    return [{"step": step, "reward/all/mean": step / 10} for step in range(first, last + 1)]
