"""What the policies of a sweep have learned and forgotten, and how far they have moved from their start.

    python experiments/forgetting/kl.py <sweep> <start> [--env math]

KL(start ‖ policy) of whole replies, in nats: replies are sampled from the start, and at each of their tokens the KL of
the two next-token distributions is summed over the whole vocabulary (arXiv 2509.04259 measures the same on the new
task). The mean over held-out prompts of `--env` goes to `kl.csv` beside this file, a line a run, with the last held-out
rewards; those of the start come first. `kl.md` has their means over seeds, ± half their 95 % interval, what each arm
has gained since the start, by seed, and the rank correlation of KL and the other envs' reward. `kl.png` draws that
reward against that of `--env` at each evaluation, means over seeds, and against the KL at the end, a point a run.
"""

import argparse
import json
from itertools import takewhile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl.base.checkpoint_folders import checkpoint_path, steps_of
from prl.tools.report.runs import Run, find_runs, read_run
from prl.tools.report.statistics import plus_minus
from prl.tools.report.tables import Table, markdown
from prl.tools.report.variants import overrides_of, seed_of

REPLY_TOKENS = 64


def prompts_of(run: Path, env: str, tokenizer) -> list[list[int]]:
    """Return the prompts of a run's first evaluation on an env, as tokens."""
    lines = (run / "rollouts" / f"eval_{env}_step_000000.jsonl").read_text().splitlines()
    messages = [json.loads(line)["messages"] for line in lines]
    asked = [list(takewhile(lambda message: message["role"] != "assistant", of_rollout)) for of_rollout in messages]
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in asked]


@torch.no_grad()
def replies_of(model, prompts: list[list[int]]) -> list[list[int]]:
    """Sample a reply to each prompt, its end included. Prompts of one length run together."""
    ends = model.generation_config.eos_token_id
    replies: list[list[int]] = [[]] * len(prompts)
    for length in {len(prompt) for prompt in prompts}:
        places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
        batch = torch.tensor([prompts[place] for place in places])
        sampled = model.generate(
            batch, attention_mask=torch.ones_like(batch), do_sample=True, top_k=0, max_new_tokens=REPLY_TOKENS
        )
        for place, tokens in zip(places, sampled[:, length:].tolist(), strict=True):
            size = next((number for number, token in enumerate(tokens, 1) if token in ends), len(tokens))
            replies[place] = tokens[:size]
    return replies


@torch.no_grad()
def logprobs_of(model, prompt: list[int], reply: list[int]) -> torch.Tensor:
    """Return the log-distributions of the reply's tokens, [tokens, vocabulary], float64."""
    logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


def mean_kl(start: list[torch.Tensor], policy: list[torch.Tensor]) -> float:
    """Return the mean over replies of the KL summed over their tokens."""
    sums = [(p.exp() * (p - q)).sum().item() for p, q in zip(start, policy, strict=True)]
    return sum(sums) / len(sums)


def kls(runs: list[Run], start: Path, env: str) -> list[float]:
    """Return the mean KL of each run's last checkpoint, on replies that are the same for all."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(start)
    beginning = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    prompts = prompts_of(runs[0].dir, env, tokenizer)
    pairs = list(zip(prompts, replies_of(beginning, prompts), strict=True))
    before = [logprobs_of(beginning, *pair) for pair in pairs]
    found = []
    for run in runs:
        last = checkpoint_path(run.dir, steps_of(run.dir)[-1])
        policy = AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
        found.append(mean_kl(before, [logprobs_of(policy, *pair) for pair in pairs]))
    return found


def rewards_of(run: Run) -> pd.DataFrame:
    """Return the held-out rewards of a run: a row an evaluation, a column an env."""
    columns = [name for name in run.metrics if name.startswith("eval/") and name.endswith("/avg@1")]
    return run.metrics[columns].dropna().rename(columns=lambda name: name.split("/")[1])


def correlation(last: pd.DataFrame, others: list[str]) -> pd.Series:
    """Return the rank correlation of KL and the other envs' reward over the arms, a value a seed."""
    of_seeds = {
        seed: runs[others].mean(axis=1).corr(runs["kl"], method="spearman")
        for seed, runs in last.groupby("seed", sort=False)
    }
    return pd.Series(of_seeds)


def table(title: str, rows: pd.DataFrame, sign: str = "") -> Table:
    """Return the means of each arm, ± half their intervals over seeds."""
    keys = rows.columns.drop(["arm", "seed", "run"])
    cells = [
        [str(arm), *(plus_minus(of_arm[key], sign) for key in keys)] for arm, of_arm in rows.groupby("arm", sort=False)
    ]
    return Table(title=title, head=["arm", *keys], rows=cells)


def text_of(start: pd.DataFrame, last: pd.DataFrame, env: str) -> str:
    """Return the tables: what each arm ends with, what it has gained on each env by seed; and the correlation."""
    envs = list(start.columns.drop(["arm", "seed", "run", "kl"]))
    before = start.set_index("seed")[envs]
    gained = last.drop(columns="kl")
    gained[envs] -= before.loc[last["seed"]].to_numpy()
    learned = last[last[env] > before[env].max()]
    found = correlation(learned, [each for each in envs if each != env])
    parts = [
        markdown(table("Held-out reward, and KL to the start", pd.concat([start, last]))),
        markdown(table("Reward gained since the start, by seed", gained, sign="+")),
        f"Rank correlation of KL and the others' reward over the arms that learned {env}: {plus_minus(found, '+')}\n",
    ]
    return "\n".join(parts)


def draw(curves: dict[str, pd.DataFrame], last: pd.DataFrame, env: str, path: Path) -> None:
    """Draw the mean reward of the other envs against that of `env`, and against the KL at the end."""
    figure, (learned, moved) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for arm, curve in curves.items():
        others = list(curve.columns.drop(env))
        [line] = learned.plot(curve[env], curve[others].mean(axis=1), marker="o", markersize=3, label=arm)
        ends = last[last["arm"] == arm]
        moved.scatter(ends["kl"], ends[others].mean(axis=1), color=line.get_color(), s=12)
    learned.set(xlabel=f"held-out reward of {env}", ylabel="mean held-out reward of the others")
    moved.set(xlabel="KL(start ‖ policy), nats a reply")
    learned.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("start", type=Path, help="the checkpoint that its runs began with")
    parser.add_argument("--env", default="math")
    options = parser.parse_args()
    runs = [run for run in map(read_run, find_runs([options.sweep])) if run.status == "completed"]
    names = pd.DataFrame({
        "arm": [overrides_of(run)["arm"].removeprefix("forgetting_") for run in runs],
        "seed": [seed_of(run) for run in runs],
        "run": [run.dir.name for run in runs],
    })  # fmt: skip
    rewards = [rewards_of(run) for run in runs]
    first, last = (names.join(pd.DataFrame([found.iloc[at] for found in rewards], index=names.index)) for at in (0, -1))
    last["kl"] = kls(runs, options.start, options.env)
    start = first.drop_duplicates("seed").assign(arm="start", run="", kl=0.0)
    text = text_of(start, last, options.env)
    print(text)
    here = Path(__file__)
    here.with_suffix(".md").write_text(text)
    pd.concat([start, last]).to_csv(here.with_suffix(".csv"), index=False, float_format="%.4g")
    curves = {
        str(arm): pd.concat([rewards[place] for place in of_arm]).groupby(level=0).mean()
        for arm, of_arm in names.groupby("arm", sort=False).groups.items()
    }
    draw(curves, last, options.env, here.with_suffix(".png"))


if __name__ == "__main__":
    main()
