"""How far the policies of a sweep have moved from the model that they began with, on held-out prompts of an env.

    python experiments/forgetting/kl.py <sweep> <start> [--env math]

KL(start ‖ policy) of whole replies, in nats: replies are sampled from the start, and at each of their tokens the KL of
the two next-token distributions is summed over the whole vocabulary (arXiv 2509.04259 measures the same on the new
task). The mean over prompts goes to `kl.csv` beside this file, a line a run.
"""

import argparse
import csv
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl.tools.report.runs import find_runs
from prl.transport.checkpoint_folders import checkpoint_path, steps_of

REPLY_TOKENS = 64


def prompts_of(run: Path, env: str, tokenizer) -> list[list[int]]:
    """Return the prompts of a run's first evaluation on an env, as tokens."""
    lines = (run / "rollouts" / f"eval_{env}_step_000000.jsonl").read_text().splitlines()
    asked = [json.loads(line)["messages"][:1] for line in lines]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("start", type=Path, help="the checkpoint that its runs began with")
    parser.add_argument("--env", default="math")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.start)
    start = AutoModelForCausalLM.from_pretrained(options.start, dtype=torch.float32)
    runs = find_runs([options.sweep])
    prompts = prompts_of(runs[0], options.env, tokenizer)
    replies = replies_of(start, prompts)
    pairs = list(zip(prompts, replies, strict=True))
    before = [logprobs_of(start, *pair) for pair in pairs]
    rows = []
    for run in runs:
        last = checkpoint_path(run, steps_of(run)[-1])
        policy = AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
        kl = mean_kl(before, [logprobs_of(policy, *pair) for pair in pairs])
        rows.append({"run": run.name, "checkpoint": last.name, "kl": f"{kl:.4g}"})
        print(*rows[-1].values(), sep="  ")
    with Path(__file__).with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "checkpoint", "kl"])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
