"""Held-out reward after the same number of sampled tokens, and each arm's lead over grpo by seed.

    python experiments/credit/check.py <sweep>

Of each env, the number of tokens is that of the run that sampled fewest. Between two evaluations the reward is taken to
rise in a straight line. Intervals are 95 %, Student's t over seeds. The table goes to `equal_tokens.md` beside this
file.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from prl.tools.report.statistics import half_interval

BASELINE = "credit_grpo"


def curve(run: Path, env: str) -> tuple[list[float], list[float]]:
    """Return the tokens that a run had sampled at each evaluation, and the held-out rewards."""
    sampled = 0.0
    tokens, rewards = [], []
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        sampled += line.get("tokens/generated", 0.0)
        if f"eval/{env}/avg@1" in line:
            tokens.append(sampled)
            rewards.append(line[f"eval/{env}/avg@1"])
    return tokens, rewards


def curves(sweep: Path) -> dict[tuple[str, str, int], tuple[list[float], list[float]]]:
    """Return the curve of each run of a sweep, by env, arm and seed."""
    found = {}
    for path in sorted(sweep.glob("*/result.json")):
        run = path.parent
        varied = dict(part.split("=", 1) for part in run.name.split(","))
        found[varied["env"], varied["arm"], int(varied["seed"])] = curve(run, varied["env"])
    return found


def table(sweep: Path) -> pd.DataFrame:
    """Return reward and lead of each arm on each env, at equal tokens."""
    found = curves(sweep)
    rows = []
    for env in sorted({env for env, _, _ in found}):
        budget = min(tokens[-1] for (of, _, _), (tokens, _) in found.items() if of == env)
        at = {key[1:]: float(np.interp(budget, *points)) for key, points in found.items() if key[0] == env}
        rewards = pd.Series(at).unstack()  # an arm a row, a seed a column
        for arm in rewards.index:
            lead = rewards.loc[arm] - rewards.loc[BASELINE]
            own = f"{rewards.loc[arm].mean():.3f} ± {half_interval(rewards.loc[arm]):.3f}"
            ahead = "" if arm == BASELINE else f"{lead.mean():+.3f} ± {half_interval(lead):.3f}"
            rows.append({"env": env, "arm": arm, "tokens": f"{budget:,.0f}", "held-out": own, "against grpo": ahead})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    lines = table(Path(sys.argv[1])).to_dict("records")
    keys = list(lines[0])
    rule = "| " + " | ".join("---" for _ in keys) + " |"
    text = "\n".join(
        ["| " + " | ".join(keys) + " |", rule, *("| " + " | ".join(line.values()) + " |" for line in lines)]
    )
    print(text)
    Path(__file__).with_name("equal_tokens.md").write_text(text + "\n")
