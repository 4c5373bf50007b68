"""Held-out reward after the same number of sampled tokens, and each arm's lead over grpo by seed.

    python experiments/credit/check.py <sweep>

Of each env, the number of tokens is that of the run that sampled fewest. Between two evaluations the reward is taken to
rise in a straight line. Intervals are 95 %, Student's t over seeds. The rewards by seed go to
`equal_tokens.csv` beside this file.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from prl.tools.report.runs import Run, find_runs, read_run
from prl.tools.report.statistics import curve, plus_minus
from prl.tools.report.tables import Table, markdown
from prl.tools.report.variants import overrides_of, seed_of

BASELINE = "credit_grpo"
Curve = tuple[pd.Series, pd.Series]


def by_tokens(run: Run, env: str) -> Curve:
    """Return the tokens that a run had sampled at each evaluation, and the held-out rewards."""
    rewards = curve(run.metrics, f"eval/{env}/avg@1")
    return run.metrics["tokens/generated"].fillna(0).cumsum()[rewards.index], rewards


def curves(sweep: Path) -> dict[tuple[str, str, str], Curve]:
    """Return the curve of each completed run of a sweep, by env, arm and seed."""
    found = {}
    for run in map(read_run, find_runs([sweep])):
        if run.status != "completed":
            continue
        varied = overrides_of(run)
        found[varied["env"], varied["arm"], seed_of(run)] = by_tokens(run, varied["env"])
    return found


def at_equal_tokens(sweep: Path) -> pd.DataFrame:
    """Return rewards at the number of tokens of an env: a row an env, its tokens and an arm, a column a seed."""
    found = curves(sweep)
    budgets: dict[str, float] = {}
    for (env, _, _), (tokens, _) in found.items():
        budgets[env] = min(tokens.iloc[-1], budgets.get(env, np.inf))
    at = {
        (env, budgets[env], arm, seed): float(np.interp(budgets[env], *points))
        for (env, arm, seed), points in found.items()
    }
    return pd.Series(at).rename_axis(["env", "tokens", "arm", "seed"]).unstack()


def table(rewards: pd.DataFrame) -> pd.DataFrame:
    """Return reward and lead of each arm on each env."""
    rows = []
    for env, budget, arm in rewards.index:
        own = rewards.loc[env, budget, arm]
        ahead = "" if arm == BASELINE else plus_minus(own - rewards.loc[env, budget, BASELINE], "+")
        rows.append(
            {
                "env": env,
                "arm": arm,
                "tokens": f"{budget:,.0f}",
                "held-out": plus_minus(own),
                "against grpo": ahead,
            }
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    rewards = at_equal_tokens(Path(sys.argv[1]))
    rewards.to_csv(Path(__file__).with_name("equal_tokens.csv"), float_format="%.6f")
    found = table(rewards)
    print(markdown(Table(title="At equal tokens", head=list(found), rows=found.to_numpy().tolist())))
