"""The held-out rewards of sweeps over the rate, at each evaluation.

    python experiments/forgetting/rates.py <sweep> …

A line a run and evaluation goes to `rates.csv` beside this file. `python experiments/recompute.py forgetting` works out
what of the other env is lost where arms earn the same reward of `math`.
"""

import sys
from pathlib import Path

import pandas as pd

from prl.tools.report.runs import find_runs, read_run
from prl.tools.report.variants import overrides_of, seed_of


def evaluations(sweeps: list[Path]) -> pd.DataFrame:
    """Return the rewards of completed runs: a row an evaluation."""
    found = []
    for run in map(read_run, find_runs(sweeps)):
        if run.status != "completed":
            continue
        columns = [name for name in run.metrics if name.startswith("eval/") and name.endswith("/avg@1")]
        rewards = run.metrics[columns].dropna().rename(columns=lambda name: name.split("/")[1]).reset_index()
        names = {
            "arm": run.dir.parent.name.removeprefix("rates-"),
            "lr": overrides_of(run)["model.lr"],
            "seed": seed_of(run),
        }
        found.append(rewards.assign(**names))
    return pd.concat(found)[["arm", "lr", "seed", "step", "math", "alphabet_sort"]]


if __name__ == "__main__":
    table = evaluations([Path(sweep) for sweep in sys.argv[1:]])
    table.to_csv(Path(__file__).with_suffix(".csv"), index=False, float_format="%.4f")
