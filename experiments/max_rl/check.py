"""pass@k of max_rl against grpo: means over seeds, and max_rl's lead by seed.

    python experiments/max_rl/check.py outputs/exp-max-rl-eval

Reads what `prl eval` has written of the base and of each run of the sweep. Intervals are 95 %, Student's t over seeds.
The table goes to `pass_at_k.md`, the values by seed to `pass_at_k.csv`, the picture to `pass_at_k.png`, all beside this
file.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from prl.tools.report.statistics import plus_minus
from prl.tools.report.tables import Table, markdown

BASE = "base"


def read(evaluation: Path) -> pd.DataFrame:
    """Return pass@k, a column each k, of each target: `BASE` or algorithm and group size, and its seed."""
    rows = {}
    for target in json.loads((evaluation / "result.json").read_text())["targets"]:
        job = Path(target["path"]).parents[1].name  # <job>/checkpoints/step_000060
        varied = dict(pair.split("=") for pair in job.split(",")) if "=" in job else {}
        size = varied.get("orchestrator.group_size", "")
        variant = f"{varied['algo']}, {size}" if varied else BASE
        [scores] = target["envs"]
        rows[variant, varied.get("seed", "")] = {int(k): score["mean"] for k, score in scores["pass@k"].items()}
    return pd.DataFrame.from_dict(rows, orient="index").sort_index(axis="columns")


def table(found: pd.DataFrame) -> list[list[str]]:
    """Return a row of means ± intervals for each variant, and one of max_rl's lead for each group size."""
    rows = [[BASE, *(f"{value:.3f}" for value in found.loc[BASE].iloc[0])]]
    by_variant = {variant: found.loc[variant] for variant in found.index.unique(0) if variant != BASE}
    for variant, scores in by_variant.items():
        rows.append([variant, *(plus_minus(scores[k]) for k in found)])
    for size in sorted({variant.split(", ")[1] for variant in by_variant}, key=int):
        lead = by_variant[f"max_rl, {size}"] - by_variant[f"grpo, {size}"]
        rows.append([f"max_rl − grpo, {size}", *(plus_minus(lead[k], "+") for k in found)])
    return rows


def draw(found: pd.DataFrame, path: Path) -> None:
    """Draw pass@k against k: the mean of each variant, and the range of its seeds."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for variant in found.index.unique(0):
        scores = found.loc[variant]
        [line] = axes.plot(found.columns, scores.mean(), label=variant, marker="o", markersize=3)
        axes.fill_between(found.columns, scores.min(), scores.max(), color=line.get_color(), alpha=0.15)
    axes.set(xscale="log", xlabel="k", ylabel="pass@k", xticks=found.columns, xticklabels=found.columns)
    axes.minorticks_off()
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    found = read(Path(sys.argv[1]))
    head = ["", *(f"pass@{k}" for k in found)]
    text = markdown(Table(title="pass@k", head=head, rows=table(found)))
    print(text)
    Path(__file__).with_name("pass_at_k.md").write_text(text)
    found.to_csv(Path(__file__).with_name("pass_at_k.csv"), index_label=["variant", "seed"], float_format="%.6f")
    draw(found, Path(__file__).with_name("pass_at_k.png"))
