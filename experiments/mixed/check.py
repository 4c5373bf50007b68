"""Whether the components of a mixed batch dilute each other, on the batches that a run has kept.

    python experiments/mixed/check.py <sweep>

The gradient of the rl loss must be the same whether the tokens of opd are in the batch or not, and the other way round;
so the gradient of the batch is the sum of the two. Worked out at the weights of the first step. Exits with 1 where the
difference is more than 1e-4 of the norm; beside it, what one count for all tokens would have made of the gradient.
"""

import sys
from pathlib import Path

import msgspec
import torch

from prl.losses import default_loss
from prl.models import model_path
from prl.rollouts.messages import STREAM_FILL, MicroBatch, StepBatch, sequence_slices
from prl.trainer.model import load_model
from prl.trainer.trainer import Trainer

STEPS = (1, 10, 20)


def only(row: MicroBatch, env: str) -> MicroBatch:
    """The row with the tokens of the other envs out of every component."""
    keep = [False] * len(row.mask)
    for name, part in zip(row.env_names, sequence_slices(row.sequence_lengths), strict=True):
        keep[part] = [name == env] * (part.stop - part.start)
    streams = {name: getattr(row, name) for name in ("mask", *STREAM_FILL) if name.endswith(("mask", "weights"))}
    return msgspec.structs.replace(
        row,
        **{
            name: [value if on else type(value)(0) for value, on in zip(values, keep, strict=True)]
            for name, values in streams.items()
            if values is not None
        },
    )


def gradient(batch: StepBatch) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of a batch, unclipped, at the base model, float64; and the metrics of its step."""
    torch.manual_seed(0)
    model = load_model(model_path("tiny"), device=torch.device("cpu"))
    trainer = Trainer(model=model, rl_losses={"": default_loss}, max_steps=1, max_grad_norm=1e9)
    metrics = trainer.train_step(batch)
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()]), metrics


def check(path: Path) -> bool:
    """Compare the gradients of one kept batch, and say what they are. True where one dilutes the other."""
    batch = msgspec.msgpack.decode(path.read_bytes(), type=StepBatch)
    whole, metrics = gradient(batch)
    parts = [
        gradient(StepBatch(batch.step, [only(row, env) for row in batch.micro_batches], batch.truncated))[0]
        for env in ("math", "reverse_text")
    ]
    error = float((whole - sum(parts)).norm() / whole.norm())
    share = metrics["tokens/rl"] / (metrics["tokens/rl"] + metrics["tokens/ref_kl"])
    diluted = float((whole - share * parts[0] - (1 - share) * parts[1]).norm() / whole.norm())
    print(
        f"{path.parent.parent.parent.name}, step {batch.step}: {share:.0%} of the tokens rl; norms rl "
        f"{parts[0].norm():.4g}, ref_kl {parts[1].norm():.4g}, both {whole.norm():.4g}; difference from their sum "
        f"{error:.1e} of the norm (with one count for all tokens {diluted:.2f})"
    )
    return error > 1e-4


if __name__ == "__main__":
    batches = [
        path
        for run in sorted(path.parent for path in Path(sys.argv[1]).glob("*/result.json"))
        for path in sorted(run.glob("batches/*/rank_0.msgpack"))
        if int(path.parent.name.rpartition("_")[2]) in STEPS
    ]
    diluted = [check(path) for path in batches]
    raise SystemExit(any(diluted) or not batches)
