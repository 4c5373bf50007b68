"""The most memory that a trainer's step takes, in a process of its own: `python peak.py <case as JSON>`.

As scripts/bench_memory measures it: resident pages, above those before the model was loaded.
"""

import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import torch
from small_models import batch

from prl.trainer.lora import add_adapters
from prl.trainer.loss import default_loss
from prl.trainer.model import load_model
from prl.trainer.state import write_part
from prl.trainer.trainer import Trainer

bench = SourceFileLoader("bench", str(Path(__file__).parents[2] / "scripts" / "bench_memory")).load_module()


def peak(case: dict) -> float:
    """Bytes of the second step, of two forward passes, and of its checkpoint; the first makes the optimiser's state."""
    before, length, vocabulary = bench.status("VmRSS"), case["length"], case["vocabulary"]
    model = load_model(case["folder"], device=torch.device("cpu"))
    if case["lora"] is not None:
        add_adapters(model, case["lora"], case["folder"])
    trainer = Trainer(model=model, rl_losses={"": default_loss}, max_steps=2, **case["knobs"])
    trainer.train_step(batch(1, 64, 64, length, vocabulary))
    shipped = batch(2, 2 * case["knobs"]["tokens_per_forward"], length, length, vocabulary)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins again at what is held now
    trainer.train_step(shipped)
    write_part(Path(case["folder"]) / "run", 2, trainer, {})
    return bench.status("VmHWM") - before


if __name__ == "__main__":
    print(json.dumps(peak(json.loads(sys.argv[1]))))
