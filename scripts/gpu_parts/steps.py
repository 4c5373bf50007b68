"""A step of the trainer on one row: its time, and its peak memory beside what a dry run says of it."""

import argparse
import os
import platform
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from gpu_parts import NO_ROOM, Row, bench_trainer, row
from prl.config.hardware import CUDA_CONTEXT, GIB
from prl.config.schema import ModelConfig
from prl.tools.dry_run.memory import Pass, trainer_memory
from prl.tools.dry_run.shape import shape_of
from prl.trainer.ranks import meet

BENCH = bench_trainer()
NEAR = {"cpu": 0.5, "cuda": 0.25}
"""Share by which a peak may differ from what is predicted; of a CPU the pages of the process are measured."""


def machine(*, device: str) -> Iterator[Row]:
    """What is there, and what CUDA takes of the GPU for itself."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    name = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores of a CPU"
    yield row("machine", f"{name}, {versions}", "", None)
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        taken = total - free - torch.cuda.memory_reserved()
        measured, expected = (
            f"{taken / GIB:.2f} GiB",
            f"{CUDA_CONTEXT / GIB:.2f} GiB by a dry run, at most +{NEAR[device]:.0%}",
        )
        ok = taken <= CUDA_CONTEXT * (1 + NEAR[device])
        yield row("GPU memory outside of torch, all processes", measured, expected, ok, taken=taken)


def check(
    *, device: str, size: int, model: str, tokens: int, steps: int, checkpointing: str, compiled: bool, share: float
) -> Iterator[Row]:
    """Rows for the time and for the peak, or one that says how much memory it would take.

    Args:
        device: `cpu` or `cuda`.
        size: of the matrices of the rate that the time is compared with.
        model: as of bench_trainer.
        tokens: of the row.
        steps: that are timed.
        checkpointing: `trainer.gradient_checkpointing`.
        compiled: `trainer.compile`.
        share: of the matrix rate, at least.
    """
    name = f"{model}, a row of {tokens:,}, checkpointing {checkpointing}{', compiled' * compiled}"
    place, cuda = torch.device(device), device == "cuda"
    how = {"checkpointing": checkpointing, "cuda": cuda, "spread": True}
    promised = predicted(model, Pass(tokens=tokens, length=tokens, size=2, **how))
    before = 0.0
    if cuda and promised > (free := torch.cuda.mem_get_info()[0]):
        yield Row(name, f"predicted {promised / GIB:.1f} GiB, of {free / GIB:.1f} that are free", "", NO_ROOM)
        return
    if not cuda:
        Path("/proc/self/clear_refs").write_text("5")  # the most it has held begins again at what it holds now
        before = BENCH.peak(place)
    random.seed(0)
    meet(0, 1, place, {})
    options = {"model": model, "tokens": [tokens], "rows": 1, "steps": steps, "matrix": size}
    bench = BENCH.Bench(argparse.Namespace(**options, checkpointing=checkpointing, compile=compiled), place)
    step = bench.case(name, BENCH.documents(1, tokens, bench.vocabulary, bench.chance), tokens, share=False)
    dist.destroy_process_group()
    if step is None:
        yield row(name, "out of memory", f"{promised / GIB:.2f} GiB by a dry run", False)
        return
    reached = step.rate / bench.rate
    measured = (
        f"{step.seconds:.3f} s, {step.tokens_per_s:,.0f} tokens/s, {reached:.1%} of {bench.rate / 1e12:.3g} TFLOP/s"
    )
    expected, ok = (f"{share:.0%} at least", reached >= share) if share else ("", None)
    yield row(f"time: {name}", measured, expected, ok, seconds=step.seconds, share=reached, rate=bench.rate)
    peak, near = step.peak - before, NEAR[device]
    least = 0.0 if compiled else 1 - near  # a dry run does not know what compiled layers leave out
    expected = f"{promised / GIB:.2f} GiB by a dry run, {'at most +' if compiled else '+-'}{near:.0%}"
    ok = least <= peak / promised <= 1 + near
    yield row(f"peak: {name}", f"{peak / GIB:.2f} GiB", expected, ok, peak=peak, predicted=promised)


def predicted(model: str, how: Pass) -> float:
    """Bytes at the peak of a step, by a dry run's arithmetic."""
    with tempfile.TemporaryDirectory() as folder:
        BENCH.config_of(model).save_pretrained(folder)
        shape = shape_of(ModelConfig(path=folder), "model", trained=True)
    return sum(trainer_memory(shape, how).values())
