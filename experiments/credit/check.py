"""Held-out reward after the same number of sampled tokens, and each arm's lead over grpo by seed.

    python experiments/credit/check.py <sweep>

Of each env, the number of tokens is that of the run that sampled fewest. Between two evaluations the reward is taken to
rise in a straight line. Intervals are 95 %, Student's t over seeds. The table goes to `equal_tokens.md` beside this
file.
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


def table(sweep: Path) -> pd.DataFrame:
    """Return reward and lead of each arm on each env, at equal tokens."""
    found = curves(sweep)
    rows = []
    for env in sorted({env for env, _, _ in found}):
        budget = min(tokens.iloc[-1] for (of, _, _), (tokens, _) in found.items() if of == env)
        at = {key[1:]: float(np.interp(budget, *points)) for key, points in found.items() if key[0] == env}
        rewards = pd.Series(at).unstack()  # an arm a row, a seed a column
        for arm in rewards.index:
            lead = rewards.loc[arm] - rewards.loc[BASELINE]
            own = plus_minus(rewards.loc[arm])
            ahead = "" if arm == BASELINE else plus_minus(lead, "+")
            rows.append({"env": env, "arm": arm, "tokens": f"{budget:,.0f}", "held-out": own, "against grpo": ahead})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    found = table(Path(sys.argv[1]))
    text = markdown(Table(title="At equal tokens", head=list(found), rows=found.to_numpy().tolist()))
    print(text)
    Path(__file__).with_name("equal_tokens.md").write_text(text)
