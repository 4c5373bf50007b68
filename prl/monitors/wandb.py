"""Metrics in Weights & Biases."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from prl.monitors.base import Monitor


@dataclass(kw_only=True, eq=False)
class Wandb(Monitor):
    """A Weights & Biases run, with its files under `wandb/` in the run directory."""

    needs_package: ClassVar[str] = "wandb"
    mode: Literal["offline", "online"] = "offline"
    """offline keeps everything in the files, which `wandb sync` can send later; online sends it at once."""
    project: str = "prl"
    """The project that the run belongs to."""

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any]) -> None:
        self.check("Weights & Biases")
        import wandb

        self._run = wandb.init(
            project=self.project,
            name=run_dir.name,
            dir=run_dir,
            mode=self.mode,
            config=run_config,
            settings=wandb.Settings(console="off", silent=self.mode == "offline"),  # online it says the address
        )

    def step(self, line: dict[str, float]) -> None:
        self._run.log({key: value for key, value in line.items() if key != "step"}, step=int(line["step"]))

    def close(self) -> None:
        self._run.finish()
