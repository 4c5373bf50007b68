"""Metrics in the terminal."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prl.base import terminal
from prl.base.metric_names import SAMPLED, held_out
from prl.base.text import as_message
from prl.monitors.base import Monitor

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Console(Monitor):
    """The terminal's view of a run, on standard error. Its lines go into the log, whatever the mode."""

    mode: Literal["plain", "quiet"] = "plain"
    """plain: one line per step; quiet: nothing."""

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any], resumed_at: int = 0) -> None:
        self.terminal = terminal.Console(stderr=True)
        self.max_steps = max_steps
        self.resumed_at = resumed_at
        self.started = self.first_step = time.monotonic()
        """When the run began and when step 0 was recorded."""

    def step(self, line: dict[str, float]) -> None:
        if line["step"] == 0:
            self.first_step = time.monotonic()
        facts = [f"step {line['step']:.0f}/{self.max_steps}", *self._facts(line)]
        # Steps of an earlier part of the run say nothing of the pace.
        done = int(line["step"]) - self.resumed_at
        if done > 0:  # the time left, at the pace so far
            a_step = (time.monotonic() - self.first_step) / done
            facts.append(f"left={clock(a_step * (self.max_steps - int(line['step'])))}")
        self.status("  ".join(facts))

    def status(self, text: str) -> None:
        """Log a line, and print it with the time since the start if lines are shown."""
        log.info("%s", text)
        if self.mode == "plain":
            since = clock(time.monotonic() - self.started)
            self.terminal.print(f"{since}  {as_message(text)}", soft_wrap=True, highlight=False, markup=False)

    def _facts(self, line: dict[str, float]) -> list[str]:
        """The few numbers worth a glance."""
        evals = [f"{key}={value:.3f}" for key, value in held_out(line).items()]
        if SAMPLED not in line:
            return evals
        rates = ", ".join(f"{line[f'tokens/{kind}_per_second']:,.0f} {kind}" for kind in ("generated", "trained"))
        return [
            f"reward={line[SAMPLED]:.3f}",
            *evals,
            f"loss={line['loss/mean']:+.4f}",
            f"entropy={line.get('entropy/all/mean', 0.0):.3f}",
            f"staleness={line['off_policy/mean']:.1f} (max {line['off_policy/max']:.0f})",
            f"tokens/s={rates}",
        ]


def clock(seconds: float) -> str:
    """Seconds as m:ss, from an hour on as h:mm:ss."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
