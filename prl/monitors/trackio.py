"""Metrics and some rollouts in Trackio."""

import contextlib
import contextvars
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from prl.monitors.base import Monitor
from prl.monitors.examples import examples, facts_of, messages_of
from prl.monitors.wandb import sweep_of


@dataclass(kw_only=True, eq=False)
class Trackio(Monitor):
    """A run in Trackio's database on this machine, which `trackio show` opens.

    The database holds the runs of all projects, so it is not in the run directory: `TRACKIO_DIR` says where. A resumed
    run goes on in the newest run of its name there; steps that it repeats keep the values of the time before.
    """

    needs_package: ClassVar[str] = "trackio"
    project: str = "prl"
    """The project that the run belongs to; the jobs of a sweep are one group in it."""

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any], resumed_at: int = 0) -> None:
        self.check("Trackio")
        import trackio

        self._run_dir, self._max_steps = run_dir, max_steps
        with contextlib.redirect_stdout(None):
            # In a context of its own: Trackio would finish, at the exit, the run that it finds in this one's.
            self._run = contextvars.copy_context().run(
                trackio.init,
                project=self.project,
                name=run_dir.name,
                group=sweep_of(run_dir),
                config=run_config,
                resume="allow" if resumed_at else "never",
                embed=False,
            )
        self._first_step = self._run._next_step  # 0.43 has no public way to ask for it

    def step(self, line: dict[str, float]) -> None:
        import trackio

        step = int(line["step"])
        if step >= self._first_step:
            records = examples(self._run_dir, step, self._max_steps)
            traces = [trackio.Trace(messages_of(each), facts_of(each)) for each in records]
            metrics = {key: value for key, value in line.items() if key != "step"}
            self._run.log(metrics | ({"rollouts": traces} if traces else {}), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(None):
            self._run.finish()
