"""Rewards of single held-out tasks of SmolLM2's runs: means, intervals over tasks and seeds, and a picture.

    python experiments/smollm2/held_out.py outputs    reads the runs there, writes tasks.csv and sampled.csv
    python experiments/smollm2/held_out.py            the means, and held_out.png, from these two files

A line of `tasks.csv` is the reward of one try of a task by the policy of a step, one of `sampled.csv` the replies that
had been sampled for training until then. All seeds hold out the same tasks.
"""

import json
import re
import sys
from collections.abc import Iterator
from math import sqrt
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from scipy.special import stdtrit

HERE = Path(__file__).parent
LEVEL = 0.95
RUNS = {"adder": "exp-smollm2-adder"}
"""Name in the tables -> the folder of its sweep."""
PANELS = [("a calculator is asked, its answer used", ["adder"], {"its demonstrations": 0.2, "never listens": 0.0005})]
"""Title, runs, and the rewards of players that learn nothing (baselines.py), of each picture."""
KEYS = ["run", "seed", "step"]


def rewards_of(folder: Path) -> Iterator[tuple[int, str, float]]:
    """Yield step, task and reward of each held-out rollout of a run; the prompt names the task."""
    for path in folder.glob("rollouts/eval_*_step_*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            task = next(message["content"] for message in record["messages"] if message["role"] == "user")
            yield record["step"], task.removesuffix("="), record["reward"]


def collect(outputs: Path) -> None:
    """Write the rewards and the sampled replies of the runs under a folder, completed or not."""
    tasks, spent = [], []
    for name, sweep in RUNS.items():
        for folder in sorted((outputs / sweep).glob("seed=*")):
            seed = int(re.sub(r"\D", "", folder.name))
            tasks += [(name, seed, *row) for row in sorted(rewards_of(folder))]
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            metrics = pd.DataFrame(lines).groupby("step").first()
            replies = metrics.get("rollouts/batch", pd.Series(0, metrics.index)).fillna(0).cumsum()
            evaluated = metrics.filter(like="eval/").dropna(how="all").index
            spent += [(name, seed, step, int(replies[step])) for step in evaluated]
    pd.DataFrame(tasks, columns=[*KEYS, "task", "reward"]).to_csv(HERE / "tasks.csv", index=False, float_format="%.4g")
    pd.DataFrame(spent, columns=[*KEYS, "sampled"]).to_csv(HERE / "sampled.csv", index=False)


def half_over(table: pd.DataFrame) -> float:
    """Return half the 95 % interval of a mean reward over tasks (rows) and seeds (columns).

    The variances of the two means are added, which counts what is left of a single reward in both: too wide rather than
    too narrow. Student's t has Satterthwaite's degrees of freedom. One seed says nothing of others: over tasks alone.
    """
    means = [table.mean(axis=1), table.mean(axis=0)]
    parts = [(values.var() / len(values), len(values) - 1) for values in means if len(values) > 1]
    variance = sum(part for part, _ in parts)
    if not variance:
        return 0.0
    freedom = variance**2 / sum(part**2 / own for part, own in parts)
    return float(stdtrit(freedom, (1 + LEVEL) / 2) * sqrt(variance))


def curves() -> pd.DataFrame:
    """Return mean and interval by run and step, and the range of the seeds, from the files beside this one."""
    tasks, sampled = (pd.read_csv(HERE / f"{name}.csv") for name in ("tasks", "sampled"))
    rows = []
    for (name, step), of_step in tasks.groupby(["run", "step"]):
        table = of_step.pivot(index="task", columns="seed", values="reward")
        of_seeds = table.mean(axis=0)
        spent = sampled[(sampled["run"] == name) & (sampled["step"] == step)]["sampled"].mean()
        found = {"run": name, "step": step, "sampled": round(spent), "seeds": len(of_seeds), "tasks": len(table)}
        found |= {"mean": of_seeds.mean(), "half": half_over(table), "low": of_seeds.min(), "high": of_seeds.max()}
        rows.append(found)
    return pd.DataFrame(rows)


def draw(found: pd.DataFrame) -> None:
    """Draw the means, their intervals and each seed's curve, and what players have that learn nothing."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(5.5 * len(PANELS), 3.6), squeeze=False)
    for panel, (title, names, baselines) in zip(axes[0], PANELS, strict=True):
        for name in names:
            rows = found[found["run"] == name]
            panel.fill_between(rows["sampled"], rows["mean"] - rows["half"], rows["mean"] + rows["half"], alpha=0.2)
            label = f"{name}, mean of {rows['seeds'].max()}"
            panel.plot(rows["sampled"], rows["mean"], marker="o", markersize=4, label=label)
        for number, (player, reward) in enumerate(baselines.items()):
            panel.axhline(reward, color="black", linewidth=1, linestyle=("--", ":")[number], label=player)
        panel.set(title=title, xlabel="replies sampled", ylabel="held-out reward", ylim=(-0.02, 1))
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "held_out.png", dpi=120)


if __name__ == "__main__":
    if sys.argv[1:]:
        collect(Path(sys.argv[1]))
    else:
        learned = curves()
        print(learned.round(3).to_string(index=False))
        draw(learned)
