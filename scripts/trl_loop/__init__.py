"""TRL's side of scripts/bench_trl: a GRPOTrainer with its plain `generate` loop, run as a script in TRL's environment.

    python scripts/trl_loop/__init__.py JOB.json

Of prl it takes the grader alone, from its file: the package changes how libraries are imported.

The job names the model's folder, the tasks (a prompt as text, an answer) and what GRPOConfig is given. It prints a line
for each step that begins as prl's does, with the mean reward and the mean length of the replies in tokens.
"""

import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

GRADER = Path(__file__).parents[2] / "prl" / "envs" / "tasksets" / "integer.py"

grade = SourceFileLoader("integer", str(GRADER)).load_module().grade


def reward(completions: list[str], answer: list[int], **_: object) -> list[float]:
    """TRL's reward function: what prl's `math` env gives."""
    return [grade(reply, wanted) for reply, wanted in zip(completions, answer, strict=True)]


def line(step: int, max_steps: int, logs: dict[str, float]) -> str:
    """What is said of a step."""
    return f"step {step}/{max_steps}  reward={logs['reward']:.3f}  length={logs['completions/mean_length']:.2f}"


def main(path: Path) -> None:
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Lines(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            if "reward" in logs:  # the last log of a run is of the whole
                print(line(state.global_step, state.max_steps, logs), flush=True)

    job = json.loads(path.read_text(encoding="utf-8"))
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(path.parent), **job["settings"]),
        train_dataset=Dataset.from_list(job["tasks"]),
        callbacks=[Lines()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
