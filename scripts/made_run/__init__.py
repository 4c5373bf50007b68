"""A run directory as a run of any size would leave it, written in no time: for measuring and testing the page of a run.

The numbers are made up, with curves of the usual shapes; every rollout is a group's, with messages and an outcome.
"""

import json
import math
import random
from pathlib import Path

import msgspec

from prl.rollouts.record_lines import Message, Record
from prl.rollouts.rollout import Outcome, Stage, encodable

HOSTILE = (
    "</script><img src=x onerror=\"document.title='owned'\"><!-- {{ 7*7 }} {% raw %} ${7*7} "
    "<svg onload=alert(1)> \u202eright to left\u202c \u2028 \x1b[31m ]]>"
)
"""What a model might write: markup, comments, templates, a turn of the direction of writing, half a character."""


def make_run(
    folder: Path, *, steps: int, rollouts: int, group: int = 8, text: str = "", tokens_at: tuple[int, ...] = ()
) -> Path:
    """Write a run of `steps` steps with `rollouts` rollouts each.

    Args:
        folder: the run directory; must not exist.
        steps: training steps.
        rollouts: of a step; of two envs, in groups of `group`.
        group: rollouts of a group.
        text: what every reply says behind its number; "" = words at random.
        tokens_at: steps whose tokens are exported, of the first 32 rollouts.
    """
    draw = random.Random(0)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run: {{name: {folder.name}, dir: x}}\nmax_steps: {steps}\nseed: 3\n")
    lines = [{"step": 0.0, "eval/math/avg@1": 0.25}]
    for step in range(1, steps + 1):
        records = [_record(draw, step, place, steps, group, text) for place in range(rollouts)]
        encoded = [json.dumps(msgspec.to_builtins(record)) + "\n" for record in records]
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text("".join(encoded))
        lines.append(_metrics(draw, step, steps, records))
        if step in tokens_at:
            path = folder / "tokens" / f"step_{step:06d}" / "rank_0.jsonl"
            path.parent.mkdir(parents=True)
            path.write_text("".join(json.dumps(_tokens(draw, record)) + "\n" for record in records[:32]))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _events(folder, steps)
    result = {"status": "completed", "steps": steps, "seconds": 1.5 * steps}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def _events(folder: Path, steps: int) -> None:
    """What its processes did: the engine generates for 1.2 s of a step's 1.5 s, the trainer works for 0.45 s."""
    (folder / "events").mkdir()
    began = 1_700_000_000.0
    orchestrator, trainer = Lines("orchestrator", began), Lines("trainer", began)
    orchestrator.add("preparing", 0, 4, 0)
    for step in range(1, steps + 1):
        at = 10 + 1.5 * (step - 1)
        orchestrator.add("waiting for rollouts", at, at + 1.4, step)
        orchestrator.add("packing", at + 1.4, at + 1.5, step)
        orchestrator.add("generating", at, at + 1.1, step, "engine")
        orchestrator.add("loading weights", at + 1.1, at + 1.2, step, "engine")
        trainer.add("waiting for a batch", at, at + 1.05, step)
        trainer.add("forward and backward", at + 1.05, at + 1.4, step)
        trainer.add("exporting weights", at + 1.4, at + 1.5, step)
    for lines in (orchestrator, trainer):
        (folder / "events" / f"{lines.process}.jsonl").write_text("".join(lines.written))


class Lines:
    """The file of one process; times in seconds since it began."""

    def __init__(self, process: str, began: float):
        self.process, self.began = process, began
        self.written: list[str] = []

    def add(self, what: str, start: float, stop: float, step: int, process: str = "") -> None:
        span = {"process": process or self.process, "what": what, "step": step}
        self.written.append(json.dumps(span | {"start": self.began + start, "stop": self.began + stop}) + "\n")


def _record(draw: random.Random, step: int, place: int, steps: int, group: int, text: str) -> Record:
    env = ("math", "reverse_text")[place // group % 2]
    right = draw.random() < 0.3 + 0.6 * step / steps
    words = text or " ".join(draw.choices(["so", "the", "sum", "is", "then", "twelve", "minus", "carry"], k=24))
    trained = draw.random() < 0.6
    return Record(
        step=step,
        env=env,
        task=step * 31 + place // group,
        group=step * 1000 + place // group,
        rollout=place % group,
        reward=float(right),
        rewards={"answer": float(right)},
        metrics={"correct": float(right)},
        advantage=(0.5 if right else -0.5) if trained else 0.0,
        start_version=step - 1,
        end_version=step - 1,
        outcome=Outcome(Stage.TRAINED) if trained else Outcome(Stage.POST_FILTERED, "no signal", "zero_advantage"),
        completion_tokens=24,
        messages=[Message("user", f"{place}+{step}="), Message("assistant", f"{place + step} {words}")],
    )


def _tokens(draw: random.Random, record: Record) -> dict:
    """A line of the trainer's export."""
    said = encodable(record.messages[1].content)
    text = [*"user: ", *(f"{word} " for word in said.split(" "))]
    mask = [False] * 6 + [True] * (len(text) - 6)
    sampler = [-draw.random() if on else 0.0 for on in mask]
    policy = [value + draw.gauss(0, 0.1) if on else None for value, on in zip(sampler, mask, strict=True)]
    return {
        "step": record.step,
        "env": record.env,
        "group": record.group,
        "rollout": record.rollout,
        "agent": record.agent,
        "text": text,
        "token_ids": list(range(len(text))),
        "mask": mask,
        "inference_logprobs": sampler,
        "trainer_logprobs": policy,
        "ratio": [None if p is None else math.exp(p - s) for p, s in zip(policy, sampler, strict=True)],
        "advantages": [(record.advantage or 0.0) if on else 0.0 for on in mask],
        "ref_logprobs": [-draw.random() if on else 0.0 for on in mask],
        "ref_kl_weights": [draw.choice([0.0, 0.5, 1.0]) if on else 0.0 for on in mask],
        "use": [draw.choice(["rl kept", "rl kept", "rl dropped"]) if on else "context" for on in mask],
    }


def _metrics(draw: random.Random, step: int, steps: int, records: list[Record]) -> dict[str, float]:
    done = step / steps
    line = {"step": float(step)}
    for env in ("math", "reverse_text", "all"):
        here = [record for record in records if env in (record.env, "all")]
        line[f"reward/{env}/mean"] = sum(record.reward or 0.0 for record in here) / max(1, len(here))
        line[f"length/{env}/mean"] = 24 + 4 * done + draw.random()
        line[f"truncated/{env}"] = 0.02 * draw.random()
    trained = sum(record.stage is Stage.TRAINED for record in records)
    line |= {f"filters/all/{name}": draw.random() * 0.2 for name in ("zero_advantage", "repetition", "gibberish")}
    line |= {"rollouts/batch": len(records), "rollouts/trained": trained, "rollouts/arrived": len(records)}
    line |= {
        "time/step": 1.5,
        "time/rollout": 1.1 + 0.1 * draw.random(),
        "time/train": 0.3,
        "time/update_weights": 0.05,
    }
    line |= {"time/wait_for_batch": 0.8, "time/wait_for_policy": 0.02, "grad_norm": 1 + draw.random()}
    line |= {"entropy/all/mean": 1.2 - done + 0.1 * draw.random(), "logprob_gap/mean": 1e-3 * draw.random() + 1e-5}
    line |= {"mismatch_kl/all/mean": 1e-4 * draw.random() + 1e-7, "loss/rl": draw.gauss(0, 0.1)}
    line |= {"off_policy/mean": 1.0, "off_policy/max": 1.0, "tokens/generated_per_second": 5000 + 500 * draw.random()}
    return line | {f"metric/{env}/m{i}": draw.random() for env in ("math", "reverse_text") for i in range(3)}
