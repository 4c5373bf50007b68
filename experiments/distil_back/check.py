"""How many times fewer steps and tokens than grpo each arm takes to several held-out rewards, by seed.

    python experiments/distil_back/check.py outputs/exp-distil-back

The geometric mean over seeds of the ratio, with its 95 % interval (Student's t of its logarithm); no ratio where a seed
did not get there. The table goes to `ratios.md` beside this file.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from prl.tools.report.runs import find_runs, read_run
from prl.tools.report.statistics import curve, half_interval, until
from prl.tools.report.tables import Table, markdown
from prl.tools.report.variants import overrides_of, seed_of

METRIC, BASELINE = "eval/math/avg@1", "distil_back_grpo"
THRESHOLDS = (0.7, 0.75, 0.8, 0.85)


def reached(sweep: Path) -> pd.DataFrame:
    """Return the steps and tokens of each run until each threshold: a row an arm, threshold and seed."""
    rows = []
    for run in map(read_run, find_runs([sweep])):
        rewards = curve(run.metrics, METRIC)
        for threshold in THRESHOLDS:
            which = {"arm": overrides_of(run)["arm"], "threshold": threshold, "seed": seed_of(run)}
            rows.append(which | until(run.metrics, rewards, threshold))
    return pd.DataFrame(rows).set_index(["arm", "threshold", "seed"]).sort_index()


def ratio(baseline: pd.Series, arm: pd.Series) -> str:
    """Return the geometric mean of baseline / arm over the seeds, and its interval."""
    logs = np.log(baseline / arm)
    if logs.isna().any():
        return "not reached by all"
    middle, half = logs.mean(), half_interval(logs)
    low, mean, high = np.exp([middle - half, middle, middle + half])
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def table(sweep: Path) -> Table:
    """Return the ratios: a row an arm and threshold."""
    found, rows = reached(sweep), []
    for arm in found.index.unique("arm").drop(BASELINE):
        for threshold in THRESHOLDS:
            before, own = found.loc[BASELINE, threshold], found.loc[arm, threshold]
            ratios = [ratio(before[unit], own[unit]) for unit in ("steps", "tokens")]
            steps = [f"{steps.mean():.1f}" for steps in (before["steps"], own["steps"])]
            rows.append([arm, f"{threshold:g}", *steps, *ratios])
    head = ["arm", "held-out reward", "steps of grpo", "steps", "times fewer steps", "times fewer tokens"]
    return Table(title="Against grpo", head=head, rows=rows)


if __name__ == "__main__":
    text = markdown(table(Path(sys.argv[1])))
    print(text)
    Path(__file__).with_name("ratios.md").write_text(text)
