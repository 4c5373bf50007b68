"""Rewards of single held-out tasks of SmolLM2's runs: means, intervals over tasks and seeds, and a picture.

    python experiments/smollm2/held_out.py outputs/exp-smollm2-adder-eval …

writes `tasks.csv` and `sampled.csv` from the evaluations, and the runs beside them. Without arguments it prints the
means and draws held_out.png from these two files.

A line of `tasks.csv` is the reward of one try of a task by the policy of a step. One of `sampled.csv` has the replies
that a run had by then, sampled or demonstrated, and their mean reward since the step before. All seeds hold out the
same tasks, and begin with the policy that has `start` for a seed.
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
RUNS = {
    "exp-smollm2-sums": "sums, sft",
    "exp-smollm2-sums-grpo": "sums, grpo",
    "exp-smollm2-sums-trl": "sums, grpo by TRL",
    "exp-smollm2-adder": "adder, grpo",
    "exp-smollm2-adder-opd": "adder, opd",
}
"""Folder of a sweep -> its name in the tables."""
STARTS = {
    "smollm2-*": ["sums, sft"],
    "exp-smollm2-sums/seed=0/checkpoints/step_000020": ["sums, grpo", "sums, grpo by TRL"],
    "exp-smollm2-adder-form/checkpoints/step_000012": ["adder, grpo", "adder, opd"],
}
"""End of the path of weights, a pattern -> the sweeps that begin with them."""
BEFORE = {"sums, grpo": 640, "sums, grpo by TRL": 640}
"""Replies of the sweep that a start is of: both go on where it was."""
IMITATED = {"sums, sft"}
"""Runs whose replies are demonstrations, all of which are right."""
PANELS = [
    ("sums such as 12+34=", ["sums, sft", "sums, grpo", "sums, grpo by TRL"], {"always 128": 0.029}),
    (
        "a calculator is asked, its answer used",
        ["adder, grpo", "adder, opd"],
        {"its demonstrations": 0.2, "never listens": 0.0005},
    ),
]
"""Title, runs, and the rewards of players that learn nothing (baselines.py), of each picture."""
KEYS = ["run", "seed", "step"]


def of_target(path: Path) -> list[tuple[str, str, int]]:
    """Return runs, seed and step of the weights that were evaluated: those of a sweep, the start of others, or both."""
    places = [(name, "start", 0) for end, names in STARTS.items() if path.match(end) for name in names]
    if (sweep := next((folder for folder in path.parents if folder.name in RUNS), None)) is not None:
        [seed] = re.findall(r"seed=(\d+)", str(path))
        places.append((RUNS[sweep.name], seed, int(re.findall(r"\d+", path.name)[-1])))
    return places


def rewards_of(evaluation: Path) -> Iterator[tuple[str, str, int, str, float]]:
    """Yield run, seed, step, task and reward of each rollout of an evaluation; the prompt names the task."""
    for target in json.loads((evaluation / "result.json").read_text())["targets"]:
        [path] = evaluation.glob(f"rollouts/eval_*_step_{target['step']:06}.jsonl")
        for record in map(json.loads, path.read_text().splitlines()):
            task = next(message["content"] for message in record["messages"] if message["role"] == "user")
            for place in of_target(Path(target["path"])):
                yield *place, task.removesuffix("="), record["reward"]


def sampled_by(run: Path) -> pd.DataFrame:
    """Return the replies that a run had by each step, and their mean reward since the step before."""
    if (run / "metrics.jsonl").exists():
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        table = pd.DataFrame(lines).groupby("step").first()[["rollouts/batch", "reward/all/mean"]].dropna()
    else:  # TRL's last state: a line a step
        last = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
        lines = [
            line for line in json.loads((last / "trainer_state.json").read_text())["log_history"] if "reward" in line
        ]
        given = json.loads((run / "job.json").read_text())["settings"]
        size = given["per_device_train_batch_size"] * given["gradient_accumulation_steps"]
        table = pd.DataFrame(
            {line["step"]: {"rollouts/batch": size, "reward/all/mean": line["reward"]} for line in lines}
        ).T
    table.columns = ["sampled", "reward"]
    return table.assign(sampled=table["sampled"].cumsum().astype(int)).rename_axis("step").reset_index()


def collect(evaluations: list[Path]) -> None:
    """Write the rewards of single tasks, and the replies of the runs, which lie beside the evaluations."""
    tasks = sorted(row for folder in evaluations for row in rewards_of(folder))
    pd.DataFrame(tasks, columns=[*KEYS, "task", "reward"]).to_csv(HERE / "tasks.csv", index=False, float_format="%.4g")
    spent = []
    for sweep, name in RUNS.items():
        for seed in sorted({seed for run, seed, *_ in tasks if run == name} - {"start"}):
            folder = evaluations[0].parent / sweep / f"seed={seed}"
            spent.append(sampled_by(folder).assign(run=name, seed=seed))
    pd.concat(spent)[[*KEYS, "sampled", "reward"]].to_csv(HERE / "sampled.csv", index=False, float_format="%.4g")


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
        spent = sampled[(sampled["run"] == name) & (sampled["step"] == step)]["sampled"]
        replies = BEFORE.get(name, 0) + (round(spent.mean()) if step else 0)
        found = {"run": name, "step": step, "replies": replies}
        found |= {"seeds": len(of_seeds), "tasks": len(table), "mean": of_seeds.mean(), "half": half_over(table)}
        rows.append(found | {"low": of_seeds.min(), "high": of_seeds.max()})
    return pd.DataFrame(rows)


def lead(ahead: str, behind: str, step: int) -> tuple[float, float]:
    """Return by how much a run is ahead of another at a step, paired by task and seed, and half the interval."""
    tasks = pd.read_csv(HERE / "tasks.csv").set_index([*KEYS, "task"])["reward"].unstack("seed")
    difference = (tasks.loc[ahead, step] - tasks.loc[behind, step]).dropna(axis="columns")
    return difference.mean(axis=None), half_over(difference)


def draw(found: pd.DataFrame) -> None:
    """Draw the means and their intervals, what sampled replies earned by seed, and players that learn nothing."""
    panels = [panel for panel in PANELS if set(panel[1]) & set(found["run"])]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 3.6), squeeze=False)
    replies = pd.read_csv(HERE / "sampled.csv")
    for panel, (title, names, baselines) in zip(axes[0], panels, strict=True):
        for color, name in enumerate(names):
            rows = found[found["run"] == name]
            panel.errorbar(rows["replies"], rows["mean"], rows["half"], color=f"C{color}", fmt="o-", capsize=3,
                           label=f"{name}, held out")  # fmt: skip
            for seed, of_seed in replies[(replies["run"] == name) & ~replies["run"].isin(IMITATED)].groupby("seed"):
                label = f"{name}, sampled, by seed" if seed == 0 else None
                panel.plot(BEFORE.get(name, 0) + of_seed["sampled"], of_seed["reward"], color=f"C{color}",
                           linewidth=0.8, alpha=0.6, label=label)  # fmt: skip
        for place, (player, reward) in enumerate(baselines.items()):
            panel.axhline(reward, color="black", linewidth=1, linestyle=("--", ":")[place], label=player)
        panel.set(title=title, xlabel="replies sampled (of sft: demonstrated)", ylabel="reward", ylim=(-0.02, 1.02))
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(HERE / "held_out.png", dpi=120)


if __name__ == "__main__":
    if sys.argv[1:]:
        collect([Path(folder).absolute() for folder in sys.argv[1:]])
    else:
        learned = curves()
        print(learned.round(3).to_string(index=False))
        mean, half = lead("sums, grpo", "sums, grpo by TRL", 30)
        print(f"sums, grpo, ahead of TRL's at the end: {mean:+.3f} ± {half:.3f}")
        draw(learned)
