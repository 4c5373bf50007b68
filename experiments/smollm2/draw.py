"""Held-out reward of SmolLM2's runs against the replies that each had trained on.

    python experiments/smollm2/draw.py

The picture goes to `learning.png` beside this file.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from prl.tools.report.runs import read_run
from prl.tools.report.statistics import curve

PANELS = {
    "sums such as 12+34=": ("eval/math/avg@1", {"sft": "sums", "grpo, after 20 steps of sft": "sums-grpo"}),
    "find a number in several turns": ("eval/guess/avg@4", {"grpo": "guess", "opd, from grpo's policy": "guess-opd"}),
}


def main() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for panel, (title, (metric, runs)) in zip(axes, PANELS.items(), strict=True):
        for label, name in runs.items():
            run = read_run(Path(f"outputs/exp-smollm2-{name}"))
            rewards = curve(run.metrics, metric)
            trained = run.metrics["rollouts/trained"].fillna(0).cumsum()[rewards.index]
            panel.plot(trained, rewards, marker="o", markersize=4, label=label)
        panel.set(title=title, xlabel="replies trained on", ylim=(0, 1))
        panel.legend()
    axes[0].set_ylabel("held-out reward")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("learning.png"), dpi=120)


if __name__ == "__main__":
    main()
