"""Metrics in Weights & Biases."""

import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from prl.base.files import write_atomically
from prl.monitors.base import Monitor


@dataclass(kw_only=True, eq=False)
class Wandb(Monitor):
    """A Weights & Biases run, with its files under `wandb/` in the run directory.

    A run that goes on is one run there: steps that it repeats keep the values of the time before. Offline its parts
    have one id, so that `wandb sync` sends them as one run.
    """

    needs_package: ClassVar[str] = "wandb"
    mode: Literal["offline", "online"] = "offline"
    """offline: files only, for `wandb sync` later; online: send at once."""
    project: str = "prl"
    """The project of the run."""
    group: str | None = None
    """The group of the run; null = its sweep, if it is a job of one."""

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any], resumed_at: int = 0) -> None:
        self.check("Weights & Biases")
        import wandb

        if "weave" not in sys.modules:  # else wandb advertises it in the terminal
            os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        print("starting Weights & Biases: its service takes up to 30 s", file=sys.stderr, flush=True)
        self._run = wandb.init(
            project=self.project,
            group=self.group or sweep_of(run_dir),
            name=run_dir.name,
            id=run_id(run_dir, goes_on=resumed_at > 0),
            resume="allow" if self.mode == "online" and resumed_at else None,  # offline it would be ignored
            dir=run_dir,
            mode=self.mode,
            config=run_config,
            settings=wandb.Settings(
                console="off",
                silent=self.mode == "offline",  # online it says the address
                x_disable_meta=True,  # the command line and Slurm's variables as they are, with what is secret in them
            ),
        )

    def step(self, line: dict[str, float]) -> None:
        self._run.log({key: value for key, value in line.items() if key != "step"}, step=int(line["step"]))

    def close(self) -> None:
        self._run.finish()


def run_id(run_dir: Path, *, goes_on: bool) -> str:
    """The id of the run in Weights & Biases: a new one, or that of the time before where the run goes on."""
    path = run_dir / "wandb" / "run-id"
    if not (goes_on and path.is_file()):
        write_atomically(path, secrets.token_hex(4).encode())
    return path.read_text(encoding="utf-8")


def sweep_of(run_dir: Path) -> str | None:
    """The name of the sweep that a run is a job of; None if it is not."""
    return run_dir.parent.name if (run_dir.parent / "sweep.json").exists() else None
