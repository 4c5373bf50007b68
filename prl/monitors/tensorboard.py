"""Metrics in TensorBoard."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from prl.monitors.base import Monitor
from prl.monitors.rollouts import COLUMNS, distributions, read_rollouts, rows

TABLE_ROWS = 64
"""Rollouts of a table: TensorBoard shows it on one page."""


@dataclass(kw_only=True, eq=False)
class TensorBoard(Monitor):
    """Event files under `tensorboard/` in the run directory: `tensorboard --logdir <run>/tensorboard`.

    Beside the metrics they have histograms of the rollouts of each step, and tables of rollouts.
    """

    needs_package: ClassVar[str] = "tensorboard"
    table_every: Annotated[int, Ge(1)] | None = 20
    """Steps between tables of rollouts, of `TABLE_ROWS` each; null = none."""

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any]) -> None:
        self.check("TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        self._run_dir = run_dir
        purge = self.resumed_at + 1 if self.resumed_at else None  # what an earlier part of the run wrote after it
        self._writer = SummaryWriter(log_dir=str(run_dir / "tensorboard"), purge_step=purge)

    def step(self, line: dict[str, float]) -> None:
        import numpy as np

        step = int(line["step"])
        for key, value in line.items():
            if key != "step":
                self._writer.add_scalar(key, value, step)
        records = read_rollouts(self._run_dir, step)
        for key, values in distributions(records).items():
            self._writer.add_histogram(key, np.array(values), step)
        if records and self.table_every is not None and step % self.table_every == 0:
            self._writer.add_text("rollouts", markdown(rows(records[:TABLE_ROWS])), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def markdown(table: Sequence[Sequence[object]]) -> str:
    """A Markdown table of `COLUMNS`. What a model wrote stays text: TensorBoard would render HTML and Markdown."""
    special = {ord(mark): f"&#{ord(mark)};" for mark in "&<>|`*_[]()#!\\~"} | {ord("\n"): "<br>"}
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([str(cell).translate(special) for cell in row] for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
