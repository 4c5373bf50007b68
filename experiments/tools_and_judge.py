# %% [markdown]
# # An env with tools and a judge
#
# A till: the customer's bill is a sum, the model may use a calculator, and the reward has two parts. One compares the
# last reply with the bill; the other asks a judge whether the work was done well. It takes about half a minute on two
# CPU cores.
#
# A judge is a language model behind an OpenAI-compatible endpoint. So that this page runs anywhere, its place is taken
# by a stand-in of a few lines, which answers such requests by a rule. With a real judge only its name and address
# change.

# %%
import json
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

STEPS = 10
folder = Path("outputs") / f"till-{time.strftime('%Y%m%d-%H%M%S')}"


def prl(*arguments):
    """Run a command of prl, and return what it prints. Raises RuntimeError, with its errors, if it fails."""
    done = subprocess.run([sys.executable, "-m", "prl", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


# %% [markdown]
# ## 1. The env
#
# An env is a module and a conf file. The module has tasks, tools and rewards: a method of the toolset is a tool, its
# docstring and types are what the model sees of it; a method of the task marked `@vf.reward` is a part of the reward.
# `weight` is its share. What is put into `trace.info` is kept with the rollout.

# %%
module = r'''
import verifiers.v1 as vf

from prl.envs.models import model_of
from prl.envs.tasksets.calculator import compute
from prl.envs.tasksets.judge import score_in

__all__ = ["TillTaskset"]

QUESTION = """A cashier had to work out {bill} and did this:
{work}
Rubric: the till is used once, with the whole bill, and the reply is what the till says.
Say why, and end with a line "Score: N", N from 0 to 10."""


class Till(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None
    IN_PROCESS = True

    @vf.tool
    async def calculate(self, expression: str) -> str:
        """The value of an expression."""
        return str(compute(expression))


class BillData(vf.TaskData):
    total: int


class BillTask(vf.Task[BillData]):
    @vf.reward(weight=0.6)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.total))

    @vf.reward(weight=0.4)
    async def judged(self, trace: vf.Trace) -> float:
        calls = [call.arguments for message in trace.assistant_messages for call in message.tool_calls or []]
        work = "\n".join([*(f"till: {call}" for call in calls), f"reply: {trace.last_reply}"])
        verdict = await model_of(self, "judge").ask(QUESTION.format(bill=self.data.prompt, work=work))
        trace.info["judge"] = verdict
        return score_in(verdict, best=10) / 10

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        return float(sum(len(message.tool_calls or []) for message in trace.assistant_messages))


class TillConfig(vf.TasksetConfig):
    first: int = 0
    count: int = 500


class TillTaskset(vf.Taskset[BillTask, TillConfig]):
    IN_PROCESS = True

    @classmethod
    def toolsets(cls, config: TillConfig) -> list[vf.Toolset]:
        return [Till(vf.ToolsetConfig())]

    def load(self):
        for number in range(self.config.first, self.config.first + self.config.count):
            price, items, bag = number * 7 % 89 + 2, number % 8 + 2, number * 3 % 47
            yield BillTask(BillData(prompt=f"{price}*{items}+{bag}=", total=price * items + bag))
'''
conf = """
# @package envs.till
defaults: [_fields, _self_]
taskset: my_till
args: {first: 0, count: 500}
eval_args: {first: 500, count: 64}
models:
  judge: {name: stand-in, base_url: "???"}
"""
Path("my_conf/env").mkdir(parents=True, exist_ok=True)
for path, text in {"my_till.py": module, "my_conf/env/till.yaml": conf}.items():
    Path(path).write_text(text.lstrip())

# %% [markdown]
# ## 2. Look before training
#
# `prl env check` plays one episode with replies of yours, and `--judge` stands for the judge's. It shows the prompt as
# the model gets it, with the declared tool.

# %%
call = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'
model = "models.judge={name: stand-in}"
shown = prl("env", "check", "my_till", model, "--reply", call, "--reply", "42", "--judge", "Not the bill.\nScore: 2")
print(re.sub(", in the template of .*", ":", shown))

# %% [markdown]
# ## 3. A judge
#
# The stand-in reads the question that a judge would get. It answers as the rubric says: 10 for one use of the till, 6
# for more, 1 for none.


# %%
class StandIn(BaseHTTPRequestHandler):
    """Answers the two requests that a judge gets."""

    protocol_version = "HTTP/1.1"  # a connection serves many requests

    def do_GET(self):
        self.answer({"data": [{"id": "stand-in"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        calls = body["messages"][-1]["content"].count("\ntill: ")
        score = {0: 1, 1: 10}.get(calls, 6)
        message = {"role": "assistant", "content": f"The till was used {calls} times.\nScore: {score}"}
        self.answer({"choices": [{"message": message, "finish_reason": "stop"}]})

    def answer(self, content):
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Print nothing."""


ThreadingHTTPServer.request_queue_size = 128  # a batch of replies is graded at once
judge = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
threading.Thread(target=judge.serve_forever, daemon=True).start()

# %% [markdown]
# ## 4. Train
#
# With a real judge: `envs.till.models.judge.name=<model> envs.till.models.judge.base_url=<url>`, and `api_key_var` with
# the name of the environment variable that has the key; or `{name: teacher}` for a model that the run hosts itself.

# %%
run = folder / "grpo"
prl(
    "train",
    "env=till",
    "hydra.searchpath=[file://my_conf]",
    f"envs.till.models.judge.base_url=http://127.0.0.1:{judge.server_port}/v1",
    "debug=fast",
    f"max_steps={STEPS}",
    f"run.dir={run}",
)
judge.shutdown()
judge.server_close()
metrics = pd.read_json(run / "metrics.jsonl", lines=True).set_index("step").loc[1:]
parts = {name: metrics[name] for name in metrics if name.startswith("metric/till/") or name == "reward/till/mean"}
pd.DataFrame(parts).iloc[[0, -1]].T.round(3)

# %% [markdown]
# ## 5. Read what it was paid for
#
# Each rollout keeps the parts of its reward and the judge's words. Look at the rollouts that the judge likes and the
# other part does not: a policy learns what pleases the judge, whether it is what you meant or not.

# %%
records = [
    json.loads(line)
    for path in sorted((run / "rollouts").glob("step_*.jsonl"))
    for line in path.read_text().splitlines()
]
table = pd.DataFrame(
    {
        "step": [record["step"] for record in records],
        "reply": [str(record["messages"][-1]["content"])[:20] for record in records],
        **{part: [record["rewards"].get(part) for record in records] for part in ("right", "judged")},
        "judge": [record["info"].get("judge") for record in records],
    }
)
pleased = table[(table["judged"] == table["judged"].max()) & (table["right"] == 0)]
print(f"{len(pleased)} of {len(table)} rollouts pleased the judge and were wrong")
pd.concat([table.iloc[[0, -1]], pleased.head(2)])

# %%
by_step = table.groupby("step")[["right", "judged"]].mean()
by_step.plot(title="parts of the reward", figsize=(6, 3), ylim=(0, None))
plt.show()

# %% [markdown]
# Both parts should rise together. Where the judge's part rises and the other falls, change the rubric or the weights;
# where there is no other part, read replies. One run of ten steps shows how it works, not how well:
# `prl train -m seed=0,1,2 …` has intervals.
#
# Shorter ways: `env=tools` makes a class of yours an env with tools and state, in about 15 lines (`prl/envs/TOOLS.md`);
# `env=judge` grades prompts of yours by a rubric without code (`prl/envs/tasksets/README.md`).
