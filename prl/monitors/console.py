"""Metrics in the terminal."""

import logging
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box, console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prl.monitors import terminal
from prl.monitors.base import Monitor
from prl.monitors.metric_names import SAMPLED, held_out
from prl.monitors.text import as_message

log = logging.getLogger(__name__)

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48
"""Longest row of bars, characters."""
RECENT = 8
"""Steps that token rates are averaged over: overlapping steps come in bursts."""


@dataclass(kw_only=True, eq=False)
class Console(Monitor):
    """What a run shows in the terminal, on standard error. Its lines go into the log, whatever the mode."""

    mode: Literal["auto", "live", "plain", "quiet"] = "auto"
    """live: a table that updates in place; plain: one line per step; quiet: nothing; auto: live on a terminal, else
    plain."""

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any]) -> None:
        self.terminal = terminal.Console(stderr=True)
        self.shown = self.mode if self.mode != "auto" else "live" if self.terminal.is_terminal else "plain"
        """The mode in use: live, plain or quiet."""
        self.max_steps = max_steps
        self.rewards: list[float] = []
        self.last: dict[str, float] = {}
        self.recent: deque[dict[str, float]] = deque(maxlen=RECENT)
        self.text = ""
        self.started = self.first_step = time.monotonic()
        """When the run began and when step 0 was recorded."""
        self._live = Live(self, console=self.terminal, refresh_per_second=4, transient=False)
        if self.shown == "live":
            self._live.start()

    def status(self, text: str) -> None:
        self.text = text
        self._say(text)

    def step(self, line: dict[str, float]) -> None:
        self.last |= line
        self.text = self.text if line["step"] == 0 else ""
        if line["step"] == 0:
            self.first_step = time.monotonic()
        if SAMPLED in line:
            self.rewards.append(line[SAMPLED])
            self.recent.append(line)
        left = self._left()
        facts = [f"step {line['step']:.0f}/{self.max_steps}", *self._facts(line), *([f"left={left}"] if left else [])]
        self._say("  ".join(facts))

    def _say(self, text: str) -> None:
        """Log a line, and print it with the time since the start if lines are shown."""
        log.info("%s", text)
        if self.shown == "plain":
            since = clock(time.monotonic() - self.started)
            self.terminal.print(f"{since}  {as_message(text)}", soft_wrap=True, highlight=False, markup=False)

    def _left(self) -> str | None:
        """The time left at the pace so far; None before the first step."""
        step = int(self.last.get("step", 0))
        done = step - self.resumed_at
        return clock((time.monotonic() - self.first_step) / done * (self.max_steps - step)) if done > 0 else None

    def close(self) -> None:
        self._live.stop()  # does nothing where it has not started, or a second time

    def __rich__(self) -> console.Group:
        """The live view."""
        now = time.monotonic()
        step = int(self.last.get("step", 0))
        head = Text.assemble((f"step {step}/{self.max_steps}", "bold"), f"   {clock(now - self.started)} elapsed")
        if left := self._left():
            head.append(f"   {left} left")
        if not self.rewards:
            return console.Group(head.append(f"   {self.text}", style="dim"))
        table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        table.add_row("reward", f"[bold green]{self.rewards[-1]:.3f}[/]  {spark(self.rewards)}")
        for fact in self._facts(self.last)[1:]:
            table.add_row(*fact.split("=", 1))
        return console.Group(head, table, *([Text(self.text, style="yellow")] if self.text else []))

    def _facts(self, line: dict[str, float]) -> list[str]:
        """The few numbers worth a glance."""
        evals = [f"{key}={value:.3f}" for key, value in held_out(line).items()]
        if SAMPLED not in line:
            return evals
        rates = ", ".join(f"{self._rate(kind):,.0f} {kind}" for kind in ("generated", "trained"))
        return [
            f"reward={line[SAMPLED]:.3f}",
            *evals,
            f"loss={line['loss/mean']:+.4f}",
            f"entropy={line.get('entropy/all/mean', 0.0):.3f}",
            f"staleness={line['off_policy/mean']:.1f} (max {line['off_policy/max']:.0f})",
            f"tokens/s={rates}",
        ]

    def _rate(self, kind: str) -> float:
        """Tokens per second over the last steps."""
        return sum(line[f"tokens/{kind}"] for line in self.recent) / sum(line["time/step"] for line in self.recent)


def spark(values: list[float]) -> str:
    """A line of bars: the mean of each of at most `WIDTH` stretches of `values`, scaled to their range."""
    size = -(-len(values) // WIDTH)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[int((m - low) / span * (len(BARS) - 1))] for m in means)


def clock(seconds: float) -> str:
    """Seconds as m:ss, from an hour on as h:mm:ss."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
