# %% [markdown]
# # Your data: SFT, RL, evaluation, serving
#
# From a file of questions and answers to a model that answers over HTTP, in three commands. It takes about a minute on
# two CPU cores; the model has 0.8 million parameters. With a model of yours, say `model=hf
# model.path=<folder or hub name>`: the commands are the same, and take as long as that model needs.

# %%
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from prl.models import model_path

SFT_STEPS = 14
RL_STEPS = 24
folder = Path("outputs") / f"own-data-{time.strftime('%Y%m%d-%H%M%S')}"
folder.mkdir(parents=True)


def prl(*arguments):
    """Run a command of prl, and return what it prints. Raises RuntimeError, with its errors, if it fails."""
    done = subprocess.run([sys.executable, "-m", "prl", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


# %% [markdown]
# ## 1. The data
#
# A JSON object a line. Which keys are the question and the answer is found by their names (`question`, `answer`; also
# `prompt`, `messages`, …). Here the answers have a format that the model has never seen: a length with its unit.

# %%
rng = random.Random(0)
pairs = {(rng.randrange(100), rng.randrange(100)) for _ in range(800)}
rows = [{"question": f"{a}+{b}=", "answer": f"{a + b}m"} for a, b in sorted(pairs)]
data = folder / "sums.jsonl"
data.write_text("".join(json.dumps(row) + "\n" for row in rows))
print(len(rows), "lines, such as", json.dumps(rows[0]))

# %% [markdown]
# A tenth of the questions is held out by itself. The default grader, `grader=exact`, compares the reply with the
# answer. Before a run, `prl env check jsonl args.path=<file> --reply 102m` plays one episode with a reply of yours,
# without a model: does the grader do what you mean?
#
# ## 2. A model, and its chat template
#
# The template decides which tokens are trained. That of prl's tiny model is Qwen3's, which writes an empty thought
# before each reply that is imitated; this model has never seen the tokens of a thought. So it gets a plain template
# here, in a folder of its own. `renderer=default` is the template of the model's folder.

# %%
logging.disable_progress_bar()
tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
tokenizer.chat_template = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
base = folder / "base"
tokenizer.save_pretrained(base)
AutoModelForCausalLM.from_pretrained(model_path("tiny")).save_pretrained(base)
example = [{"role": "user", "content": rows[0]["question"]}, {"role": "assistant", "content": rows[0]["answer"]}]
print(tokenizer.apply_chat_template(example, tokenize=False))

# %% [markdown]
# ## 3. SFT: the format
#
# The model knows sums but not the format, so it earns nothing, and rewards that are all 0 have no gradient:
# reinforcement learning cannot begin here. `algo=sft` imitates the answers first. The held-out reward is that of the
# model's own replies; step 0 is before the first update.

# %%
common = [
    "env=jsonl",
    f"envs.jsonl.args.path={data}",
    "renderer=default",
    "sampling.max_tokens=16",
    "debug=fast",  # everything in one process, without vLLM
    "orchestrator.eval.num_tasks=64",
]
held_out = "eval/jsonl/avg@1"


def train(name, *overrides):
    """Train, and return the run's last checkpoint and its held-out rewards."""
    run = folder / name
    prl("train", *common, f"run.dir={run}", *overrides)
    metrics = pd.read_json(run / "metrics.jsonl", lines=True)
    return sorted((run / "checkpoints").glob("step_*"))[-1], metrics[["step", held_out]].dropna().round(3)


imitated, rewards = train(
    "sft",
    f"model.path={base}",
    "algo=sft",
    "algo.sampling.source=demonstrations",
    "algo.sampling.demo_key=answer",
    "orchestrator.group_size=1",
    "orchestrator.eval.every=7",
    f"max_steps={SFT_STEPS}",
)
rewards

# %% [markdown]
# ## 4. RL from there
#
# `model.path` takes the checkpoint. GRPO samples eight replies to each question and makes the better ones more likely;
# nobody tells it the answer.

# %%
learned, rewards = train(
    "rl",
    "algo=grpo",
    f"model.path={imitated}",
    "orchestrator.group_size=8",
    "orchestrator.eval.every=12",
    f"max_steps={RL_STEPS}",
)
rewards

# %% [markdown]
# One run with one seed is a look: 64 held-out questions have an interval of about ± .1. For a claim, run
# `prl train -m seed=0,1,2 …`, whose page has intervals, or compare checkpoints on the same questions by
# `prl eval <checkpoint> <checkpoint> env=jsonl … k=4`.
#
# ## 5. Serve it
#
# A checkpoint is a Hugging Face folder: transformers, vLLM and others load it as it is. `prl serve` starts vLLM with
# it, with the chat template that it was trained with, and prints the address and the key. Any client of the OpenAI API
# can ask it.

# %%
key = "a-key-of-this-notebook"
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen(
    [sys.executable, "-m", "prl", "serve", "model=tiny", f"model.path={learned}", "name=sums", f"engine.port={port}",
     f"log={folder / 'serve.log'}"],
    env=os.environ | {"PRL_TOKEN": key},
    stderr=subprocess.PIPE,
    text=True,
)  # fmt: skip
ready = next((line for line in server.stderr if "is served at" in line), "the server has ended: see serve.log")
print(ready.partition(". ")[0].replace(str(port), "<port>"))

# %%
client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key)
for question in ("12+34=", "70+29="):
    reply = client.chat.completions.create(
        model="sums", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=16
    )
    print(question, reply.choices[0].message.content)
server.terminate()
print("ended:", server.wait(timeout=60) is not None)

# %% [markdown]
# From here: `prl/envs/tasksets/README.md` has all layouts of data and all graders, `prl/models/README.md` the models,
# `prl/launch/HARDWARE.md` what fits on a machine (`dry_run=true` prints it).
