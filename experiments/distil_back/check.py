"""How many times fewer steps and tokens than grpo each arm takes to the reward of `--threshold`, by seed.

    python experiments/distil_back/check.py experiments/distil_back/summary.csv

The geometric mean over seeds of the ratio, with its 95 % interval (Student's t of its logarithm).
"""

import sys

import numpy as np
import pandas as pd

from prl.tools.report.statistics import half_interval

METRIC, BASELINE = "eval/math/avg@1", "arm=distil_back_grpo"


def ratio(baseline: pd.Series, arm: pd.Series) -> tuple[float, float, float]:
    """Return the geometric mean of baseline / arm over the seeds, and the ends of its interval."""
    logs = np.log(baseline / arm)
    middle, half = logs.mean(), half_interval(logs)
    return float(np.exp(middle)), float(np.exp(middle - half)), float(np.exp(middle + half))


if __name__ == "__main__":
    runs = pd.read_csv(sys.argv[1])
    of_reward = runs[runs["metric"] == METRIC].set_index(["variant", "seed"])
    for arm in of_reward.index.unique("variant").drop(BASELINE):
        for unit in ("steps", "tokens"):
            fewer = ratio(of_reward.loc[BASELINE][unit], of_reward.loc[arm][unit])
            print(f"{arm}: {unit} {fewer[0]:.1f} times fewer ({fewer[1]:.1f} to {fewer[2]:.1f})")
