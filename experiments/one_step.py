# %% [markdown]
# # One step of GRPO by hand
#
# What happens between a prompt and new weights, one cell for each part, with all numbers in sight. The functions are
# those that a run of prl calls; the arithmetic is written out beside them. It takes some seconds on one core. For the
# whole loop in one file see `scripts/one_page_grpo`, and `prl/README.md` for the file of each part in prl.

# %%
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from prl.algorithms.advantage import centred
from prl.engines.decoding import Request, sample
from prl.envs.tasksets.math import MathConfig, MathTaskset
from prl.losses import LossInputs, default_loss
from prl.models import model_path

GROUP_SIZE = 8
LEARNING_RATE = 4e-4

logging.disable_progress_bar()
tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
model = AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float32)
print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")

# %% [markdown]
# ## 1. A task, and its prompt as tokens
#
# A taskset makes tasks. The chat template puts the marks of a conversation around the text; the last tokens say that
# the assistant speaks now. The tokenizer of this model has one token for each byte, and for the marks.

# %%
tasks = list(MathTaskset(MathConfig(split="train", seed=0, num_tasks=20)).load())
task = tasks[4]
messages = [{"role": "user", "content": task.data.prompt}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
print(task.data.prompt, len(prompt), "tokens:", [tokenizer.decode(token) for token in prompt])

# %% [markdown]
# ## 2. Replies
#
# A group is several replies to one prompt. The engine returns the tokens, and the logprob that each of them had when
# it was drawn. The loss needs these numbers later.

# %%
ends = model.generation_config.eos_token_id
request = Request(
    prompt_ids=prompt,
    n=GROUP_SIZE,
    seed=0,
    temperature=1.0,
    max_tokens=MathTaskset.MAX_TOKENS,
    stop_token_ids=ends if isinstance(ends, list) else [ends],
)
[replies] = sample(model.eval(), [request], tokenizer.decode)
texts = [tokenizer.decode(reply.token_ids, skip_special_tokens=True) for reply in replies]

# %% [markdown]
# ## 3. Rewards and advantages
#
# The grader gives each reply a number: 1 for the right one, below 0.1 for some right digits. GRPO's advantage is the
# reward minus the mean of the group. If all rewards were equal, every advantage would be 0 and the group would teach
# nothing.

# %%
rewards = [task.grade(text) for text in texts]
advantages = centred(rewards)
mean = sum(rewards) / len(rewards)
assert torch.allclose(torch.tensor(advantages), torch.tensor(rewards) - mean)
pd.DataFrame({"reply": texts, "reward": rewards, "advantage": advantages}).round(3)

# %% [markdown]
# ## 4. The same tokens in the trainer
#
# The trainer runs the model once over prompt and reply. The logits at one place predict the token behind it, so those
# of a reply of five tokens begin at the last token of the prompt and end before the last of the reply. On the same
# weights the trainer's logprobs are the engine's, but for rounding: this difference is the first number to look at in
# a run (`logprob_gap/mean`).


# %%
def logprobs_of(reply):
    """Logprobs of a reply's tokens under the current weights, with gradient."""
    sequence = torch.tensor([prompt + reply.token_ids])
    logits = model(sequence).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0]


_ = model.train()
reply = replies[0]
tokens = pd.DataFrame(
    {
        "token": [tokenizer.decode(token) for token in reply.token_ids],
        "engine": reply.logprobs,
        "trainer": logprobs_of(reply).tolist(),
    }
)
print("largest difference:", f"{(tokens['engine'] - tokens['trainer']).abs().max():.1e}")
tokens.round(4)

# %% [markdown]
# ## 5. The loss
#
# Each token of a reply has the advantage of its reply. The policy-gradient term of a token is −A · r, where r is its
# probability now divided by its probability when it was drawn. Here r is 1, so the value says little: it is the
# gradient that counts, −A times the gradient of the logprob. `default_loss` adds a mask for tokens whose probability
# has moved by more than .2, and a small penalty on (trainer − engine)²; on-policy both are 0. The sum is divided by
# the number of all sampled tokens of the step. These replies have the same length, so the advantages cancel and the
# loss is 0; the gradient is not.

# %%
count = sum(len(reply.token_ids) for reply in replies)
model.zero_grad()
total, by_hand = 0.0, 0.0
for reply, advantage in zip(replies, advantages, strict=True):
    now, then = logprobs_of(reply), torch.tensor(reply.logprobs)
    inputs = LossInputs(
        now,
        then,
        loss_mask=torch.ones(len(then), dtype=torch.bool),
        advantages=torch.full_like(then, advantage),
    )
    loss = default_loss(inputs).loss / count
    loss.backward()
    total += loss.item()
    by_hand += (-advantage * (now - then).exp()).sum().item() / count
print(f"loss {total:+.6f}, by hand {by_hand:+.6f}")

# %% [markdown]
# ## 6. The update
#
# The gradient is clipped to a norm of 1, as in a run, and AdamW takes a step. Then the group has other probabilities:
# replies with a positive advantage should have become more likely, those with a negative one less.

# %%
before = [logprobs_of(reply).sum().item() for reply in replies]
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0).step()
after = [logprobs_of(reply).sum().item() for reply in replies]
print(f"gradient norm {norm:.3f} before it was clipped")
moved = pd.DataFrame({"reply": texts, "advantage": advantages, "before": before, "after": after})
moved[["before", "after"]] = moved[["before", "after"]].map(lambda value: f"{torch.tensor(value).exp():.4f}")
moved.drop_duplicates("reply").round(3)

# %% [markdown]
# ## What a run adds
#
# One group taught one sum. A step of a run has many groups, and replies with equal rewards are left out. An engine
# samples while the trainer trains, so that r is no longer 1, and the mask has something to do. `loss=`, `algo=` and
# `filters=` choose other formulas for parts 3 and 5; `prl/algorithms/README.md` and `prl/EXTENDING.md` have them, and
# how to write your own.
