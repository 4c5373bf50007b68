"""What age costs each loss, and how each compares with the default one, by seed.

    python experiments/staleness/check.py outputs/exp-staleness outputs/exp-staleness-decoupled

Of the last held-out rewards: means of paired differences over seeds, ± half their 95 % interval. The table goes to
`ages.md` beside this file.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from prl.tools.report.runs import find_runs, read_run
from prl.tools.report.statistics import curve, plus_minus
from prl.tools.report.tables import Table, markdown
from prl.tools.report.variants import overrides_of, seed_of

METRIC, BASELINE = "eval/math/avg@1", "default"


def last_rewards(sweeps: Sequence[Path]) -> pd.DataFrame:
    """Return the last held-out reward of each run: a row a seed, a column a loss and level."""
    rows = []
    for run in map(read_run, find_runs(sweeps)):
        typed = overrides_of(run)
        loss = "ppo, decoupled" if "loss.proximal" in typed else typed["loss"]
        level = int(typed["orchestrator.max_async_level"])
        rows.append((seed_of(run), loss, level, curve(run.metrics, METRIC).iloc[-1]))
    return pd.DataFrame(rows, columns=["seed", "loss", "level", "reward"]).pivot(
        index="seed", columns=["loss", "level"], values="reward"
    )


def table(rewards: pd.DataFrame) -> Table:
    """Return a row a loss and level."""
    rows = []
    for loss, level in sorted(rewards, key=lambda column: (column[0] != BASELINE, *column)):
        own = rewards[loss, level]
        aged = "" if level == 0 else plus_minus(own - rewards[loss, 0], "+")
        other = "" if loss == BASELINE else plus_minus(own - rewards[BASELINE, level], "+")
        rows.append([loss, str(level), str(own.count()), plus_minus(own), aged, other])
    head = ["loss", "level", "seeds", "held-out reward", "against level 0", "against the default loss"]
    return Table(title="Held-out reward by age", head=head, rows=rows)


if __name__ == "__main__":
    text = markdown(table(last_rewards([Path(sweep) for sweep in sys.argv[1:]])))
    print(text)
    Path(__file__).with_name("ages.md").write_text(text)
