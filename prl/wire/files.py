"""The wire as files in the run directory. A file or folder appears whole or not at all.

batches/step_000001/rank_0.msgpack        orchestrator -> trainer
batches/end.json                          orchestrator -> trainer: that no batch follows, and which was the last
weights/step_000001/{model.safetensors, config.json, metrics.json}        trainer -> orchestrator
"""

import os
import shutil
from pathlib import Path

import msgspec

from prl.wire.messages import StepBatch


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def write_atomically(path: Path, data: bytes) -> None:
    """Write `path` so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def batch_path(run_dir: Path, step: int, rank: int) -> Path:
    return run_dir / "batches" / step_name(step) / f"rank_{rank}.msgpack"


def write_batch(run_dir: Path, batch: StepBatch, rank: int) -> None:
    write_atomically(batch_path(run_dir, batch.step, rank), msgspec.msgpack.encode(batch))


def read_batch(run_dir: Path, step: int, rank: int) -> StepBatch | None:
    """The batch of `step` for `rank`, or None while it has not arrived."""
    try:
        data = batch_path(run_dir, step, rank).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.msgpack.decode(data, type=StepBatch)


def write_end(run_dir: Path, last_step: int) -> None:
    """Tell the trainer that `last_step`, whose batch has been written, is the last one."""
    write_atomically(run_dir / "batches" / "end.json", msgspec.json.encode({"last_step": last_step}))


def read_end(run_dir: Path) -> int | None:
    """The last step, where that is not the configured one; None while more may follow."""
    try:
        return msgspec.json.decode((run_dir / "batches" / "end.json").read_bytes())["last_step"]
    except FileNotFoundError:
        return None


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / step_name(step)


def weights_path(run_dir: Path, version: int) -> Path:
    return run_dir / "weights" / step_name(version)


def announce(folder: Path, final: Path) -> None:
    """Make the finished `folder` visible under its final name."""
    if final.exists():
        shutil.rmtree(final)
    os.replace(folder, final)


def read_metrics(run_dir: Path, version: int) -> dict[str, float] | None:
    """The trainer's metrics of the step that made `version`, or None while it has not been announced."""
    try:
        return msgspec.json.decode((weights_path(run_dir, version) / "metrics.json").read_bytes())
    except FileNotFoundError:
        return None
