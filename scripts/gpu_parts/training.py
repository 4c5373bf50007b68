"""A whole run of the tiny model, sampled by transformers: `python -m prl.train` as a user starts it."""

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from gpu_parts import Row, row
from prl.base.step_time import mean_step

GAPS = {"float32": 1e-5, "bfloat16": 0.02}
"""By which logprobs of engine and trainer may differ, in the mean of a step, on-policy."""


def check(*, device: str, dtype: str, steps: int, batch: int, reward: float) -> Iterator[Row]:
    """Rows of a run.

    Args:
        device: of engine and trainer.
        dtype: of both.
        steps: of the run.
        batch: rollouts of a step.
        reward: of the last three steps in the mean, at least.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "prl.train", f"run.dir={folder}/run", "engine=transformers"]
        command += [f"engine.device={device}", f"trainer.device={device}", f"model.dtype={dtype}"]
        command += [f"trainer.dtype={dtype}", f"max_steps={steps}", f"orchestrator.batch_size={batch}"]
        command += ["orchestrator.max_async_level=0", "orchestrator.eval.every=null"]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        name = f"{dtype}: tiny, {steps} steps"
        if done.returncode != 0:
            yield row(name, f"exit {done.returncode}: {' '.join(done.stdout.split())[-500:]}", "completed", False)
            return
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    found = [metrics for metrics in lines if "reward/all/mean" in metrics]
    rewards, gaps = ([metrics[key] for metrics in found] for key in ("reward/all/mean", "logprob_gap/mean"))
    seconds = mean_step([*itertools.accumulate(metrics["time/step"] for metrics in found)])
    last = mean(rewards[-3:])
    measured = f"{rewards[0]:.2f} at first, {last:.2f} in the last three; {seconds:.2f} s a step"
    yield row(f"{name}: reward", measured, f"{reward} at least", last >= reward, rewards=rewards)
    measured = f"{mean(gaps):.1e} in the mean, {max(gaps):.1e} at most"
    limit = GAPS[dtype]
    yield row(
        f"{name}: logprobs, engine against trainer", measured, f"{limit:g} at most", max(gaps) <= limit, gaps=gaps
    )
