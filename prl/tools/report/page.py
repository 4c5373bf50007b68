"""The page of a run: `report.html` in its directory. One file, made from what the directory holds, at any time."""

import datetime
import json
import logging
from pathlib import Path
from typing import Any

import pandas as pd

from prl.base.files import write_atomically
from prl.base.step_time import mean_step
from prl.config.run_yaml import flat
from prl.tools.report import curves
from prl.tools.report.examples import read_rollouts
from prl.tools.report.html import data_block, render
from prl.tools.report.runs import Run, json_of, read_run
from prl.tools.report.shares import read_spans, rows, shares
from prl.tools.report.variants import shown
from prl.tools.report.verdict import duration, verdict

log = logging.getLogger(__name__)
DIFF_BYTES = 200_000
"""Most bytes of uncommitted changes on the page."""


def write_page(run_dir: Path) -> Path:
    """Write `report.html` into a run directory, whatever state the run is in. Returns its path.

    Raises ConfigError for a directory that holds no run.
    """
    path, run = Path(run_dir) / "report.html", read_run(run_dir)
    write_atomically(path, page(run).encode("utf-8", "backslashreplace"))
    for problem in run.problems:
        log.warning("%s", problem)
    return path


def page(run: Run) -> str:
    """The page as HTML."""
    values = state(run)
    rollouts = read_rollouts(run.dir, compared=values["compared"])
    run.problems.extend(rollouts.problems)
    data = {"kinds": curves.KINDS, "metrics": drawn(run.metrics), "before": drawn(run.before)}
    data |= {"rows": rollouts.rows, "examples": rollouts.examples, "compared": values["compared"]}
    return render(
        "run.html.j2",
        scripts=["curves.js", "run.js"],
        title=f"{run.dir.name} · prl",
        rollouts=rollouts,
        written=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        data=data_block("data", data),
        **values,
        **origin(run),
    )


def state(run: Run) -> dict[str, Any]:
    """Values for the fragments that change while a run goes on: `head.html.j2` and `waits.html.j2`."""
    times = shares(read_spans(run.dir, run.problems))
    waits = rows(times) if times else []
    findings = verdict(run, times)
    compared = sorted({step for finding in findings for step in finding.compared})
    return {"run": run, "verdict": findings, "compared": compared, "facts": _facts(run), "waits": waits}


def drawn(metrics: pd.DataFrame) -> curves.Columns:
    """The curves of a run, or of what it forked up to where it did."""
    columns = {key: metrics[key].dropna() for key in metrics if curves.is_drawn(key)}
    return curves.thinned({key: (list(column.index), list(column)) for key, column in columns.items() if len(column)})


def origin(run: Run) -> dict[str, Any]:
    """Values for the fragment that says what a run was asked to do: `origin.html.j2`."""
    return {"config": [(key, shown(value)) for key, value in flat(run.config).items()], "provenance": _provenance(run)}


def _facts(run: Run) -> list[tuple[str, str]]:
    """A few numbers with their names."""
    steps = run.metrics[run.metrics.index > 0]
    facts = [("steps", f"{run.result.steps}")]
    if run.result.seconds:
        facts.append(("whole run", duration(run.result.seconds)))
    if "time/step" in steps:
        seconds = steps["time/step"].dropna()
        if len(seconds) > 1:
            facts.append(("per step, mean", f"{mean_step([*seconds.cumsum()]):,.3g} s"))
        facts.append(("per step, median", f"{seconds.median():,.3g} s"))
    if "tokens/generated_per_second" in steps:
        facts.append(("tokens/s generated, median", f"{steps['tokens/generated_per_second'].median():,.0f}"))
    if "rollouts/trained" in steps:
        facts.append(("rollouts trained on", f"{steps['rollouts/trained'].sum():,.0f}"))
    return facts


def _provenance(run: Run) -> list[tuple[str, str]]:
    """Name and text of every entry of `provenance.json`, and of the changes beside it."""
    entries = {"directory": str(run.dir)} | (json_of(run.dir / "provenance.json", dict[str, Any], run.problems) or {})
    diff = run.dir / "provenance.diff"
    if diff.is_file():
        entries["uncommitted changes"] = diff.read_bytes()[:DIFF_BYTES].decode(errors="replace")
    return [
        (name, value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False))
        for name, value in entries.items()
    ]
