# %% [markdown]
# # A tour of prl
#
# Two short runs on a laptop, and a look at what they leave: metrics, replies, tokens. It takes two minutes on two CPU
# cores. `scripts/setup` installs what it needs; to run the cells, open `experiments/tour.ipynb` in an editor that runs
# notebooks, with the Python of `.venv` as its kernel, or run `python experiments/tour.py`.
#
# The model has 0.8 million parameters and learns to add: the prompt is `12+34=`, the right reply `46`.

# %%
import json
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from prl.config.compose import compose

STEPS = 40

# %% [markdown]
# ## A config
#
# One config describes a run. What you do not set has a default from the files in `conf/`. An override is `key=value`,
# or `group=option`, which chooses a file: `algo=grpo` is `conf/algo/grpo.yaml`. A misspelt key is refused, with the
# key that you may have meant.

# %%
common = ["debug=fast", f"max_steps={STEPS}"]  # debug=fast: all parts in one process, and small batches
config = compose(["run.name=tour", "algo=grpo", *common])
print("algorithm     ", config.algo["_target_"])
print("group size    ", config.orchestrator.group_size, "replies to each prompt")
print("batch size    ", config.orchestrator.batch_size, "replies a step")
print("learning rate ", config.trainer.optim["lr"])
print("temperature   ", config.sampling["temperature"])

# %% [markdown]
# ## Two runs
#
# `prl train` takes the same overrides. The first run learns from rewards (GRPO). The second has a teacher, a model that
# can add already: for each token of a reply it says how likely it finds that token (on-policy distillation, OPD).


# %%
def train(name, *overrides):
    """Train in a process of its own and return the run's directory."""
    run = Path("outputs") / f"tour-{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    command = [sys.executable, "-m", "prl.train", *overrides, *common, f"run.name={run.name}"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return run


grpo = train("grpo", "algo=grpo")
opd = train("opd", "algo=opd")

# %% [markdown]
# ## Metrics
#
# `metrics.jsonl` has one line for each step; step 0 comes before the first update. `prl/METRICS.md` says what each name
# means and where its value should be.

# %%
metrics = {name: pd.read_json(run / "metrics.jsonl", lines=True) for name, run in {"grpo": grpo, "opd": opd}.items()}
columns = ["step", "reward/all/mean", "entropy/all/mean", "loss/mean", "grad_norm", "length/all/mean"]
metrics["grpo"].loc[1:, columns].head().round(3)

# %% [markdown]
# ## Replies
#
# `rollouts/step_000001.jsonl` has every reply of the first step. A *rollout* is one attempt at a task, and a *group* is
# several attempts at the same task. GRPO's advantage is the reward minus the mean reward of the group: replies that are
# better than the others become more likely, worse ones less. This is the group whose rewards differ most; a wrong reply
# has a small reward where it is nearly right.

# %%
rollouts = pd.read_json(grpo / "rollouts" / "step_000001.jsonl", lines=True)
rollouts["prompt"] = [messages[0]["content"] for messages in rollouts["messages"]]
rollouts["reply"] = [messages[-1]["content"] for messages in rollouts["messages"]]
spread = rollouts.groupby("group")["reward"].std()
rollouts.loc[rollouts["group"] == spread.idxmax(), ["prompt", "reply", "reward", "advantage", "completion_tokens"]]


# %% [markdown]
# ## Tokens
#
# Tokens are what trains. `tokens/` has some sequences of some steps, token by token: the text, its log-probability
# when it was sampled, and what the loss did with it. Here is the end of one sequence of the GRPO run. `context` tokens
# are the prompt, and train nothing. All tokens of a reply have its advantage. `ratio` is the probability of the token
# in the trainer divided by its probability in the engine: 1, unless the weights have changed in between.


# %%
def sequences_of(run, step=1):
    """The sequences that a step has written, each as a table with a row for a token."""
    lines = (run / "tokens" / f"step_{step:06d}" / "rank_0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [
        pd.DataFrame({key: value for key, value in record.items() if isinstance(value, list)}) for record in records
    ]


sequences_of(grpo)[0][["text", "inference_logprobs", "advantages", "ratio", "use"]].tail(6).round(3)


# %% [markdown]
# OPD has no advantages. Its tokens have a weight in another part of the loss, `ref_kl`, which pulls the model towards
# the teacher: a token becomes more likely where the teacher finds it more likely than the model does (`ref_logprobs`
# above `inference_logprobs`), and less likely where the teacher does not. This is the sequence on which they differ
# most: the teacher marks the digit that is wrong, and no reward was needed.


# %%
def largest_gap(tokens):
    """How much more likely the model finds one of its tokens than the teacher does, in nats."""
    sampled = tokens["use"] != "context"
    return (tokens["inference_logprobs"] - tokens["ref_logprobs"])[sampled].max()


sequence = max(sequences_of(opd), key=largest_gap)
print("".join(sequence["text"]))
sequence[["text", "inference_logprobs", "ref_logprobs", "rl_weights", "ref_kl_weights", "use"]].tail(6).round(3)

# %% [markdown]
# ## The two runs compared
#
# The reward of a single step depends on the tasks that it drew, so the lines are means over five steps.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for name, frame in metrics.items():
    left.plot(frame["step"], frame["reward/all/mean"].rolling(5, min_periods=1).mean(), label=name)
    right.plot(frame["step"], frame["entropy/all/mean"].rolling(5, min_periods=1).mean(), label=name)
left.set(title="reward of sampled replies", xlabel="step", ylim=(0, 1))
right.set(title="entropy, nats a token", xlabel="step", ylim=(0, None))
left.legend()
plt.show()

# %%
last = {name: frame.tail(5)[["reward/all/mean", "entropy/all/mean"]].mean() for name, frame in metrics.items()}
pd.DataFrame(last).round(3)

# %% [markdown]
# One run of each is a look, not a result: another seed gives other curves. A sweep runs each with several seeds, and
# writes a page with intervals over them and a verdict:
#
# ```bash
# prl train -m algo=grpo,opd seed=0,1,2 max_steps=40 run.name=first
# ```
#
# From here: `prl/FIRST_STEPS.md` for an algorithm of your own, `prl/algorithms/README.md` for those that come with prl.
# `report.html` in the directory of each run shows more of what is on this page.
