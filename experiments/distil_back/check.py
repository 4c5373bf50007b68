"""How many times fewer steps and tokens than grpo each arm takes to several held-out rewards, by seed.

    python experiments/distil_back/check.py outputs/exp-distil-back outputs/exp-distil-back-5e-4

Compared is with grpo at the rate of the first sweep. The geometric mean over seeds of the ratio, with its 95 % interval
(Student's t of its logarithm); no ratio where a seed did not get there. The table goes to `ratios.md`, the steps and
tokens by seed to `reached.csv`, both beside this file.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from prl.tools.report.runs import find_runs, read_run
from prl.tools.report.statistics import curve, half_interval, until
from prl.tools.report.tables import Table, markdown
from prl.tools.report.variants import overrides_of, seed_of

METRIC, BASELINE = "eval/math/avg@1", "grpo"
THRESHOLDS = (0.7, 0.75, 0.8, 0.85)


def reached(sweeps: Sequence[Path]) -> pd.DataFrame:
    """Return the steps and tokens of each run until each threshold: a row an arm, rate, threshold and seed."""
    rows = []
    for run in map(read_run, find_runs(sweeps)):
        rewards = curve(run.metrics, METRIC)
        arm = overrides_of(run)["arm"].removeprefix("distil_back_")
        for threshold in THRESHOLDS:
            which = {"arm": arm, "rate": run.config["model"]["lr"], "threshold": threshold, "seed": seed_of(run)}
            rows.append(which | until(run.metrics, rewards, threshold))
    return pd.DataFrame(rows).set_index(["arm", "rate", "threshold", "seed"]).sort_index()


def geometric_mean(logs: pd.Series) -> str:
    """Return the mean of what these are the logarithms of, and its interval."""
    middle, half = logs.mean(), half_interval(logs)
    low, mean, high = np.exp([middle - half, middle, middle + half])
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def ratio(baseline: pd.Series, arm: pd.Series) -> str:
    """Return the geometric mean of baseline / arm over the seeds of the arm, and its interval."""
    logs = np.log(baseline.reindex(arm.index) / arm)
    if logs.isna().any():
        return "not reached by all"
    return geometric_mean(logs)


def steps(found: pd.Series) -> str:
    """Return the mean number of steps, or how many seeds got there."""
    return f"{found.mean():.1f}" if found.notna().all() else f"{found.notna().sum()} of {len(found)} seeds"


def table(found: pd.DataFrame, rate_of_baseline: float) -> Table:
    """Return the ratios: a row an arm, rate and threshold."""
    rows = []
    variants = found.index.droplevel(["threshold", "seed"]).unique().drop((BASELINE, rate_of_baseline))
    for arm, rate in variants:
        for threshold in THRESHOLDS:
            before, own = found.loc[BASELINE, rate_of_baseline, threshold], found.loc[arm, rate, threshold]
            ratios = [ratio(before[unit], own[unit]) for unit in ("steps", "tokens")]
            both = [steps(before["steps"]), steps(own["steps"])]
            rows.append([arm, f"{rate:g}", f"{threshold:g}", f"{len(own)}", *both, *ratios])
    head = [
        "arm",
        "rate",
        "held-out reward",
        "seeds",
        "steps of grpo",
        "steps",
        "times fewer steps",
        "times fewer tokens",
    ]
    return Table(title=f"Against grpo at {rate_of_baseline:g}", head=head, rows=rows)


if __name__ == "__main__":
    sweeps = [Path(sweep) for sweep in sys.argv[1:]]
    found = reached(sweeps)
    found.to_csv(Path(__file__).with_name("reached.csv"))
    text = markdown(table(found, read_run(find_runs(sweeps[:1])[0]).config["model"]["lr"]))
    print(text)
    Path(__file__).with_name("ratios.md").write_text(text)
