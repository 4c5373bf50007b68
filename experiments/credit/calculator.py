"""Echo on `calculator`: held-out rewards, sampled tokens and the cross-entropy of the tool's answers.

    python experiments/credit/calculator.py <sweep> …

A line a run and evaluation goes to `calculator.csv` beside this file: the held-out reward, the tokens that had been
sampled, and `nll`, the mean over the steps since the evaluation before.
"""

import sys
from pathlib import Path

import pandas as pd

from prl.tools.report.runs import find_runs, read_run
from prl.tools.report.variants import seed_of


def evaluations(sweeps: list[Path]) -> pd.DataFrame:
    """Return a row an evaluation of each completed run."""
    found = []
    for run in map(read_run, find_runs(sweeps)):
        if run.status != "completed":
            continue
        metrics = run.metrics
        rewards = metrics["eval/calculator/avg@1"].dropna()
        tokens = metrics["tokens/generated"].fillna(0).cumsum()[rewards.index]
        since = rewards.index.searchsorted(metrics.index)
        nll = metrics["nll"].groupby(since).mean() if "nll" in metrics else pd.Series(dtype=float)
        roles = run.config["algo"].get("roles") or {"tool": {"alpha": 0.1}}  # the default of echo
        echo = run.config["algo"]["_target_"].endswith("EchoAlgorithm")
        names = {"arm": f"echo, {roles['tool']['alpha']:g}" if echo else "grpo", "seed": seed_of(run)}
        table = pd.DataFrame({"step": rewards.index, "reward": rewards.to_numpy(), "tokens": tokens.to_numpy()})
        found.append(table.assign(nll=nll.reindex(range(len(table))).to_numpy(), **names))
    return pd.concat(found)[["arm", "seed", "step", "reward", "tokens", "nll"]]


if __name__ == "__main__":
    table = evaluations([Path(sweep) for sweep in sys.argv[1:]])
    table.to_csv(Path(__file__).with_suffix(".csv"), index=False, float_format="%.5g")
