# %% [markdown]
# # Why did it fall?
#
# A run learns, and then its reward falls. Here is one whose cause is known: its rate rises step by step, towards
# fifteen times what this model takes. The way to find that is with what each run leaves: the verdict, the metrics, the
# replies; then a second run, which changes one thing. It takes about a minute on two CPU cores.

# %%
import json
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from prl.tools.report.runs import read_run
from prl.tools.report.verdict import verdict

STEPS = 24
folder = Path("outputs") / f"fall-{time.strftime('%Y%m%d-%H%M%S')}"


def train(name, *overrides):
    """Train in a process of its own and return the run's directory."""
    run = folder / name
    command = [sys.executable, "-m", "prl.train", "debug=fast", f"run.dir={run}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print("the run ended with:", done.stderr.strip().splitlines()[-1][:300])
    return run


common = [f"max_steps={STEPS}", "orchestrator.eval.every=4", "orchestrator.eval.num_tasks=64", "schedule=constant"]
run = train("fell", "trainer.optim.lr=6e-3", "trainer.schedule.warmup_steps=30", *common)

# %% [markdown]
# ## 1. What happened?
#
# The verdict stands at the top of `report.html`, the page of the run; `prl report <run>` writes it again. The held-out
# reward counts: the sampled one is that of the tasks a step drew.

# %%
for finding in verdict(read_run(run)):
    print(f"{finding.mood:5}  {finding.text}")

# %%
metrics = pd.read_json(run / "metrics.jsonl", lines=True).set_index("step")
held_out = metrics["eval/math/avg@1"].dropna()
held_out.round(3).to_frame().T

# %% [markdown]
# ## 2. When, and what moved first?
#
# What moves after the reward is a consequence. So take the step of the largest fall, and look at what had left its
# usual range before. `prl/METRICS.md` has the range of each name.

# %%
names = {
    "reward/all/mean": "reward",
    "lr": "rate",
    "grad_norm": "gradient norm",
    "entropy/all/mean": "entropy",
    "length/all/mean": "length",
    "truncated/all": "cut off",
    "off_policy/mean": "staleness",
    "logprob_gap/mean": "gap to the engine",
}
watched = metrics.loc[1:, list(names)].rename(columns=names)
fall = int(held_out.diff().idxmin())
print(f"the held-out reward fell most before step {fall}: by {-held_out.diff().min():.2f}")
watched.loc[max(1, fall - 10) : fall + 5].round(4)

# %% [markdown]
# Read the columns from the left. Before the reward fell, the rate had grown, the gradient's norm with it, and the
# entropy had halved: the policy had become sure of few replies. Long replies come after the fall, so they are a
# consequence. Staleness and the gap to the engine never moved.

# %%
figure, axes = plt.subplots(2, 4, figsize=(12, 4.5), layout="constrained", sharex=True)
for axis, name in zip(axes.flat, watched, strict=True):
    axis.plot(watched.index, watched[name])
    axis.axvline(fall, color="grey", linestyle=":")
    axis.set(title=name)
plt.show()

# %% [markdown]
# ## 3. Rule out the others
#
# | suspect | it would show as | here |
# |---|---|---|
# | the grader | other rewards for the same replies | look at replies, below |
# | the data | other prompts, or the tasks have run out | look at prompts, below |
# | staleness | `off_policy/mean` above 0 | the run is synchronous: 0 |
# | length | replies that are cut off, longer replies | the columns *length* and *cut off* |
# | engine and trainer differ | `logprob_gap/mean` above 1e-3 in float32 | the column *gap to the engine* |
# | the rate | large gradients, entropy that jumps or vanishes, then the reward | *gradient norm* and *entropy* |
#
# Replies, before and after. `prl rollouts <run> --step N` shows them in a terminal.


# %%
def replies(step, count=4):
    """The first replies of a step, as a table."""
    path = run / "rollouts" / f"step_{step:06d}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    texts = [[message["content"] for message in record["messages"]] for record in records]
    table = pd.DataFrame(
        {
            "step": step,
            "prompt": [text[0] for text in texts],
            "reply": [repr(text[-1])[:40] for text in texts],
            "reward": [record["reward"] for record in records],
        }
    )
    return table.drop_duplicates("prompt").head(count)


last = int(metrics.index.max())
pd.concat([replies(1), replies(last)], ignore_index=True)

# %% [markdown]
# The prompts are of the same kind and the grader is right: the replies have become worse.
#
# ## 4. Test the cause
#
# A guess becomes a finding by one run with one change: the same seed and tasks, and a rate that stays at 4e-4.

# %%
slower = train("slower", "trainer.optim.lr=4e-4", *common)
rates = {"towards 6e-3": held_out, "4e-4": read_run(slower).metrics["eval/math/avg@1"].dropna()}
pd.DataFrame(rates).round(3)

# %% [markdown]
# It does not fall, so the rate was the cause, as far as one seed can tell.
# `prl report <run> <run> --out <folder>` puts both on one page, with what differs between their configs.
#
# What to do with such a run:
#
# - `prl train run.fork=<run>/checkpoints/step_N trainer.optim.lr=…` begins again at an earlier checkpoint with another
#   rate, if one was kept before the fall (`checkpoint.every`).
# - `orchestrator.eval.keep_best=true` keeps the weights of the best evaluation, whatever comes later.
# - `prl train -m sweep=lr_search` finds the rate of a model.
#
# `prl/TROUBLESHOOTING.md` has the other symptoms.
