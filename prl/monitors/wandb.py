"""Metrics in Weights & Biases."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from prl.monitors.base import Monitor
from prl.monitors.rollouts import COLUMNS, distributions, log_ratios, read_rollouts, rows


@dataclass(kw_only=True, eq=False)
class Wandb(Monitor):
    """A Weights & Biases run, with its files under `wandb/` in the run directory.

    Beside the metrics it has histograms of the rollouts of each step, and tables of rollouts.
    """

    needs_package: ClassVar[str] = "wandb"
    mode: Literal["offline", "online"] = "offline"
    """offline keeps everything in the files, which `wandb sync` can send later; online sends it at once."""
    project: str = "prl"
    """The project that the run belongs to."""
    group: str | None = None
    """The group that the run belongs to; null = the sweep that it is a job of, if it is one."""
    table_every: Annotated[int, Ge(1)] | None = 20
    """Steps between tables of all rollouts; null = none."""

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any]) -> None:
        self.check("Weights & Biases")
        import wandb

        if "weave" not in sys.modules:  # else wandb advertises it in the terminal
            os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        self._run_dir = run_dir
        self._run = wandb.init(
            project=self.project,
            group=self.group or sweep_of(run_dir),
            name=run_dir.name,
            dir=run_dir,
            mode=self.mode,
            config=run_config,
            settings=wandb.Settings(console="off", silent=self.mode == "offline"),  # online it says the address
        )

    def step(self, line: dict[str, float]) -> None:
        import wandb

        step = int(line["step"])
        logged: dict[str, Any] = {key: value for key, value in line.items() if key != "step"}
        records = read_rollouts(self._run_dir, step)
        histograms = distributions(records) | log_ratios(self._run_dir, step)
        logged |= {f"{key}/histogram": wandb.Histogram(values) for key, values in histograms.items()}
        if records and self.table_every is not None and step % self.table_every == 0:
            logged["rollouts"] = wandb.Table(columns=list(COLUMNS), data=rows(records))
        self._run.log(logged, step=step)

    def close(self) -> None:
        self._run.finish()


def sweep_of(run_dir: Path) -> str | None:
    """The name of the sweep that a run is a job of; None if it is not."""
    return run_dir.parent.name if (run_dir.parent / "sweep.json").exists() else None
