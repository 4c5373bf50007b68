"""Held-out reward of SmolLM2's runs against the replies that they had trained on: mean and range of the seeds.

    python experiments/smollm2/draw.py

The picture goes to `learning.png` beside this file.
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


def main() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for panel, (title, (metric, runs)) in zip(axes, PANELS.items(), strict=True):
        for label, name in runs.items():
            runs = [read_run(folder) for folder in find_runs([Path(f"outputs/exp-smollm2-{name}")])]
            rewards = pd.DataFrame({run.dir: curve(run.metrics, metric) for run in runs})
            replies = {run.dir: run.metrics["rollouts/trained"].fillna(0).cumsum() for run in runs}
            trained = pd.DataFrame(replies).loc[rewards.index].mean(axis=1)
            panel.fill_between(trained, rewards.min(axis=1), rewards.max(axis=1), alpha=0.2)
            panel.plot(trained, rewards.mean(axis=1), marker="o", markersize=4, label=label)
        panel.set(title=title, xlabel="replies trained on", ylim=(0, 1))
        panel.legend()
    axes[0].set_ylabel("held-out reward")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("learning.png"), dpi=120)


if __name__ == "__main__":
    main()
