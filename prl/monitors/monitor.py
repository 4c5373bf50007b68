"""Where a run's metrics go: `metrics.jsonl`, the terminal, Weights & Biases."""

from pathlib import Path
from typing import Any

import msgspec

from prl.monitors.config import MonitorConfig
from prl.monitors.console import Console


class Monitor:
    """Takes one line of flat metrics a step, in order, beginning with step 0."""

    def __init__(self, config: MonitorConfig, run_dir: Path, *, max_steps: int, run_config: dict[str, Any]):
        self.console = Console(config.console, max_steps)
        self.last: dict[str, float] = {}
        """The newest value of every metric."""
        self._file = (run_dir / "metrics.jsonl").open("ab")
        self._wandb = None
        if config.wandb != "disabled":
            import wandb

            self._wandb = wandb.init(
                project=config.wandb_project,
                name=run_dir.name,
                dir=run_dir,
                mode=config.wandb,
                config=run_config,
                settings=wandb.Settings(console="off"),
            )

    def status(self, text: str) -> None:
        """What the run is doing now, for the terminal."""
        self.console.status(text)

    def step(self, line: dict[str, float]) -> None:
        """Record a step: `line` holds `step` and its metrics."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        self.last |= line
        self.console.step(line)
        if self._wandb is not None:
            self._wandb.log({key: value for key, value in line.items() if key != "step"}, step=int(line["step"]))

    def close(self) -> None:
        self.console.close()
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()
