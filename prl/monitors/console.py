"""What a run shows in the terminal while it goes."""

import time
from collections import deque

from rich import box
from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48


class Console:
    """`live`: a table that updates in place. `plain`: a line a step. `quiet`: nothing.

    `auto`: live on a terminal, else quiet.
    """

    def __init__(self, mode: str, max_steps: int):
        self.terminal = Terminal(stderr=True)
        self.mode = mode if mode != "auto" else "live" if self.terminal.is_terminal else "quiet"
        self.max_steps = max_steps
        self.rewards: list[float] = []
        self.last: dict[str, float] = {}
        self.recent: deque[dict[str, float]] = deque(maxlen=8)
        self.text = ""
        self.started = time.monotonic()
        self.first_step: float | None = None
        self._live: Live | None = None
        if self.mode == "live":
            self._live = Live(self, console=self.terminal, refresh_per_second=4, transient=False)
            self._live.start()

    def status(self, text: str) -> None:
        self.text = text
        if self.mode == "plain":
            self.terminal.print(f"{clock(time.monotonic() - self.started)}  {text}", soft_wrap=True)

    def step(self, line: dict[str, float]) -> None:
        self.last |= line
        if line["step"] == 0:
            self.first_step = time.monotonic()
        if "reward/all/mean" in line:
            self.rewards.append(line["reward/all/mean"])
            self.recent.append(line)
        if self.mode == "plain":
            facts = " ".join([f"step {line['step']}/{self.max_steps}", *self._facts(line)])
            self.terminal.print(facts, soft_wrap=True, highlight=False)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __rich__(self) -> Group:
        """The live view."""
        elapsed = time.monotonic() - self.started
        step = int(self.last.get("step", 0))
        head = Text.assemble((f"step {step}/{self.max_steps}", "bold"), f"   {clock(elapsed)} elapsed")
        left = self._time_left(step)
        if left is not None:
            head.append(f"   {clock(left)} left")
        if self.text and not self.rewards:
            head.append(f"   {self.text}", style="dim")
        if not self.rewards:
            return Group(head)
        table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        table.add_row("reward", f"[bold green]{self.rewards[-1]:.3f}[/]  {spark(self.rewards)}")
        for fact in self._facts(self.last)[1:]:
            name, _, value = fact.partition("=")
            table.add_row(name, value)
        return Group(head, table)

    def _facts(self, line: dict[str, float]) -> list[str]:
        """The few numbers worth a glance."""
        facts = []
        if "reward/all/mean" in line:
            facts.append(f"reward={line['reward/all/mean']:.3f}")
            facts.append(f"loss={line['loss/mean']:+.4f}")
            facts.append(f"entropy={line.get('entropy/all/mean', 0.0):.3f}")
            facts.append(f"staleness={line['off_policy/mean']:.1f} (max {line['off_policy/max']:.0f})")
            facts.append(
                "tokens/s=" + ", ".join(f"{self._rate(kind):,.0f} {kind}" for kind in ("generated", "trained"))
            )
        facts += [f"{key}={value:.3f}" for key, value in line.items() if key.startswith("eval/") and "avg@" in key]
        return facts

    def _rate(self, kind: str) -> float:
        """Tokens per second over the last steps: overlapping steps come in bursts."""
        return sum(line[f"tokens/{kind}"] for line in self.recent) / sum(line["time/step"] for line in self.recent)

    def _time_left(self, step: int) -> float | None:
        if not step or self.first_step is None:
            return None
        return (time.monotonic() - self.first_step) / step * (self.max_steps - step)


def spark(values: list[float]) -> str:
    """A line of bars: the mean of each of at most `WIDTH` stretches of `values`, scaled to their range."""
    size = -(-len(values) // WIDTH)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[int((m - low) / span * (len(BARS) - 1))] for m in means)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
