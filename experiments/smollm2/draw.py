"""Held-out reward of SmolLM2's runs against the replies that they had trained on: mean and range of the seeds.

    python experiments/smollm2/draw.py

The picture goes to `learning.png` beside this file, its numbers to `learning.csv`.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from prl.tools.report.runs import find_runs, read_run
from prl.tools.report.statistics import curve

PANELS = {
    "sums such as 12+34=": ("eval/math/avg@1", {"sft": "sums", "grpo, after 20 steps of sft": "sums-grpo"}),
    "find a number in several turns": ("eval/guess/avg@4", {"grpo": "guess", "opd, from grpo's policy": "guess-opd"}),
}


def learning(name: str, metric: str) -> pd.DataFrame:
    """Return the held-out reward of a sweep over its seeds: a row an evaluation, with what had been spent by then."""
    runs = [read_run(folder) for folder in find_runs([Path(f"outputs/exp-smollm2-{name}")])]
    rewards = pd.DataFrame({run.dir: curve(run.metrics, metric) for run in runs})
    spent = {
        column: pd.DataFrame({run.dir: run.metrics[key].fillna(0).cumsum() for run in runs}).loc[rewards.index]
        for column, key in (("trained", "rollouts/trained"), ("tokens", "tokens/generated"))
    }
    return pd.DataFrame({
        "run": name,
        "seeds": rewards.count(axis=1),
        "trained": spent["trained"].mean(axis=1).round().astype(int),
        "tokens": spent["tokens"].mean(axis=1).round().astype(int),
        "mean": rewards.mean(axis=1),
        "lowest": rewards.min(axis=1),
        "highest": rewards.max(axis=1),
    })  # fmt: skip


def main() -> None:
    here = Path(__file__)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    found = []
    for panel, (title, (metric, runs)) in zip(axes, PANELS.items(), strict=True):
        for label, name in runs.items():
            rows = learning(name, metric)
            panel.fill_between(rows["trained"], rows["lowest"], rows["highest"], alpha=0.2)
            panel.plot(rows["trained"], rows["mean"], marker="o", markersize=4, label=label)
            found.append(rows)
        panel.set(title=title, xlabel="replies trained on", ylim=(0, 1))
        panel.legend()
    axes[0].set_ylabel("held-out reward")
    figure.tight_layout()
    figure.savefig(here.with_name("learning.png"), dpi=120)
    pd.concat(found).to_csv(here.with_name("learning.csv"), index_label="step", float_format="%.4g")


if __name__ == "__main__":
    main()
