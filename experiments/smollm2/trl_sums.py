"""TRL's GRPOTrainer with the model, tasks, grader and settings of a run of prl, as scripts/bench_trl has them.

    python experiments/smollm2/trl_sums.py PYTHON FOLDER experiment=smollm2_sums_grpo seed=0

PYTHON is that of TRL's environment, which `scripts/bench_trl` makes. Weights are saved in the folder as checkpoint-N,
at the steps where prl's run saves its own.
"""

import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

from prl.config.compose import compose

BENCH = SourceFileLoader("bench_trl", str(Path(__file__).parents[2] / "scripts" / "bench_trl")).load_module()

PARTS = 4
"""Forward passes of a batch, whose gradients TRL adds up before it updates: it divides each by the whole's tokens."""


def main(python: str, folder: Path, overrides: list[str]) -> None:
    folder.mkdir(parents=True)
    config = compose([f'run.dir="{folder}/prompts"', *overrides])
    work = BENCH.job(config)
    saved = {"save_strategy": "steps", "save_steps": config.checkpoint.every, "save_only_model": True}
    size = config.orchestrator.batch_size // PARTS  # of the whole batch at once TRL takes 13 GB and more
    work["settings"] |= saved | {"per_device_train_batch_size": size, "gradient_accumulation_steps": PARTS}
    job = folder / "job.json"
    job.write_text(json.dumps(work), encoding="utf-8")
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([python, BENCH.SIDE, job], env=BENCH.environment() | threads, check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
