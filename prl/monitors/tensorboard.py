"""Metrics in TensorBoard."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from prl.monitors.base import Monitor


@dataclass(kw_only=True, eq=False)
class TensorBoard(Monitor):
    """Event files under `tensorboard/` in the run directory: `tensorboard --logdir <run>/tensorboard`."""

    needs_package: ClassVar[str] = "tensorboard"

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any], resumed_at: int = 0) -> None:
        self.check("TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        purge = resumed_at + 1 if resumed_at else None  # what an earlier part of the run wrote after it
        self._writer = SummaryWriter(log_dir=str(run_dir / "tensorboard"), purge_step=purge)

    def step(self, line: dict[str, float]) -> None:
        step = int(line["step"])
        for key, value in line.items():
            if key != "step":
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
