# %% [markdown]
# # A loop of your own over Tinker's API
#
# `prl serve api=tinker` lends its trainer and its engine to clients of the SDK of
# [Tinker](https://tinker-docs.thinkingmachines.ai): what is sampled, rewarded and trained on is decided here, in a loop
# of forty lines. It takes two minutes on two CPU cores. The SDK is the extra `tinker`.
#
# The model has 0.8 million parameters and learns to add: the prompt is `12+34=`, the right reply `46`.

# %%
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import tinker
from tinker import types

STEPS = 30
GROUPS, GROUP_SIZE = 16, 8
LEARNING_RATE = 1e-3

# %% [markdown]
# ## A server
#
# In a terminal it is `prl serve api=tinker model=tiny`, which prints the two variables that the SDK reads. Here it is a
# process of this notebook, on a free port. All that clients make is kept in its directory: a server that is started
# again goes on with it.

# %%
folder = Path("outputs/tinker")
os.environ |= {"TINKER_API_KEY": "tml-of-this-notebook", "TINKER_TELEMETRY": "0"}
server = subprocess.Popen(
    [sys.executable, "-m", "prl.serve", "api=tinker", "model=tiny", "port=0", f"dir={folder}"],
    stderr=subprocess.PIPE,
    text=True,
)
ready = next(line for line in server.stderr if "TINKER_BASE_URL=" in line)
os.environ["TINKER_BASE_URL"] = ready.partition("TINKER_BASE_URL=")[2].split()[0]

service = tinker.ServiceClient()
print([model.model_name for model in tinker.RestClient().get_server_capabilities().result().supported_models])

# %% [markdown]
# ## The loop
#
# Each step samples a group of replies to each task from the newest weights, gives each reply the reward minus the mean
# of its group (GRPO), and makes one step of the optimiser. Position i of a datum predicts target i, so the input is all
# tokens but the last; tokens of the prompt have no advantage. `forward_backward` and `optim_step` are sent together:
# the server runs them in their order.

# %%
trainer = service.create_lora_training_client("tiny", rank=16, seed=0).result()
tokenizer, draw = trainer.get_tokenizer(), random.Random(0)


def ids_of(question):
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def datum(prompt, reply, advantage):
    before = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + reply.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": prompt[1:] + reply.tokens,
            "logprobs": [0.0] * before + reply.logprobs,
            "advantages": [0.0] * before + [advantage] * len(reply.tokens),
        },
    )


def grade(reply, answer):
    return float(tokenizer.decode(reply.tokens, skip_special_tokens=True).strip() == str(answer))


curve = []
for step in range(STEPS):
    sampler = trainer.save_weights_and_get_sampling_client().result()
    sums = [(draw.randint(1, 49), draw.randint(1, 49)) for _ in range(GROUPS)]
    prompts = [ids_of(f"{a}+{b}=") for a, b in sums]
    params = types.SamplingParams(max_tokens=8)
    asked = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP_SIZE, params) for prompt in prompts]
    data, rewards = [], []
    for (a, b), prompt, future in zip(sums, prompts, asked, strict=True):
        replies = future.result().sequences
        earned = [grade(reply, a + b) for reply in replies]
        mean = statistics.mean(earned)
        data += [datum(prompt, reply, reward - mean) for reply, reward in zip(replies, earned, strict=True)]
        rewards += earned
    passed = trainer.forward_backward(data, "importance_sampling")
    trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
    curve.append({"step": step + 1, "reward": statistics.mean(rewards), "loss": passed.result().metrics["loss:sum"]})

pd.DataFrame(curve).iloc[:: max(1, STEPS // 6)].round(3)

# %%
figure, axes = plt.subplots(figsize=(6, 2.6))
axes.plot([point["step"] for point in curve], [point["reward"] for point in curve])
axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
plt.show()

# %% [markdown]
# ## A second model, and the base
#
# Each training client has an adapter of its own beside one base. One that was never trained replies as the base does,
# whatever the first has learned.

# %%
greedy = types.SamplingParams(max_tokens=8, temperature=0.0)
other = service.create_lora_training_client("tiny", rank=4, seed=1).result()
samplers = {
    "trained": trainer.save_weights_and_get_sampling_client().result(),
    "not trained": other.save_weights_and_get_sampling_client().result(),
    "base": service.create_sampling_client(base_model="tiny").result(),
}


def says(sampler, question):
    [reply] = sampler.sample(types.ModelInput.from_ints(ids_of(question)), 1, greedy).result().sequences
    return tokenizer.decode(reply.tokens, skip_special_tokens=True)


questions = ["12+34=", "27+19=", "45+38="]
pd.DataFrame({name: [says(sampler, text) for text in questions] for name, sampler in samplers.items()}, index=questions)

# %% [markdown]
# ## What it leaves
#
# The folder of a model is read as that of a run: `prl report` makes its page, `prl watch` shows it while the loop runs.
# Names are those of prl where the meaning is the same. Rewards stay in the client.

# %%
kept = trainer.save_state("sums").result()
service.close("success").result()
model = sorted((folder / "models").iterdir())[0]
lines = [json.loads(line) for line in (model / "metrics.jsonl").read_text().splitlines()]
print(kept.path.partition("/weights/")[2], "is in", sorted(path.name for path in (model / "weights").iterdir()))
columns = ["step", "grad_norm", "logprob_gap/mean", "tokens/trained", "time/step", "idle/engine", "idle/trainer"]
pd.DataFrame(lines)[columns].tail(3)

# %% [markdown]
# The checkpoint is a Hugging Face folder, with the adapter of peft beside it: `prl chat <model>/weights/sums`,
# `prl eval`, and `create_training_client_from_state` begin with it. A run with the same settings needs no loop:
#
# ```bash
# prl train model=tiny model.lora.rank=16 trainer.optim.lr=1e-3 loss=aipo orchestrator.batch_size=128
# ```
#
# `prl/tinker/README.md` has each setting of a loop beside its key, and what differs from the hosted service.

# %%
server.terminate()
print("ended:", server.wait(timeout=60) is not None)
