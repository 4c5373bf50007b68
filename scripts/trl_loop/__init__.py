"""TRL's side of scripts/bench_trl: a GRPOTrainer with its plain `generate` loop, run as a script in TRL's environment.

    python scripts/trl_loop/__init__.py JOB.json

Of prl it takes the grader alone, from its file: the package changes how libraries are imported.

The job names the model's folder, the tasks (a prompt as text, or as messages with pictures; an answer) and what
GRPOConfig is given. It prints a line for each step that begins as prl's does, with the mean reward and the mean length
of the replies in tokens.
"""

import base64
import io
import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

GRADER = Path(__file__).parents[2] / "prl" / "envs" / "tasksets" / "integer.py"

grade = SourceFileLoader("integer", str(GRADER)).load_module().grade


def reward(completions: list[Any], answer: list[int | str], **_: object) -> list[float]:
    """TRL's reward function: what prl's `math` env gives, or `shapes` for an answer that is a word."""
    replies = [reply if isinstance(reply, str) else reply[0]["content"] for reply in completions]
    return [
        grade(reply, wanted) if isinstance(wanted, int) else float(reply.strip().removesuffix(".").lower() == wanted)
        for reply, wanted in zip(replies, answer, strict=True)
    ]


def with_pictures(task: dict[str, Any]) -> dict[str, Any]:
    """A task as TRL takes it: its pictures beside the messages, which name their places."""
    from PIL import Image

    images, messages = [], []
    for message in task["prompt"]:
        parts = []
        for part in message["content"]:
            if part["type"] == "image_url":
                content = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                images.append(Image.open(io.BytesIO(content)).convert("RGB"))
                parts.append({"type": "image"})
            else:
                parts.append(part)
        messages.append({"role": message["role"], "content": parts})
    return {"prompt": messages, "images": images, "answer": task["answer"]}


def declare_operators() -> None:
    """Declare those of torchvision that its build for CUDA lacks beside a CPU torch; its transforms use neither."""
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def line(step: int, max_steps: int, logs: dict[str, float]) -> str:
    """What is said of a step."""
    return f"step {step}/{max_steps}  reward={logs['reward']:.3f}  length={logs['completions/mean_length']:.2f}"


def main(path: Path) -> None:
    job = json.loads(path.read_text(encoding="utf-8"))
    tasks = job["tasks"]
    if not isinstance(tasks[0]["prompt"], str):
        declare_operators()
        tasks = [with_pictures(task) for task in tasks]

    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Lines(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            if "reward" in logs:  # the last log of a run is of the whole
                print(line(state.global_step, state.max_steps, logs), flush=True)

    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(path.parent), **job["settings"]),
        train_dataset=Dataset.from_list(tasks),
        callbacks=[Lines()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
