"""The monitors of a run as one."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prl.errors import PrlError, of_own_code
from prl.monitors.base import Monitor

log = logging.getLogger(__name__)


class Monitors:
    """Hands each step to every monitor of the run.

    A monitor that fails does not keep a line from the others, and it ends the run: metrics that stop unnoticed are
    worse than a run that stops. Only while closing, when nothing is left to save, a failure is a warning.
    """

    def __init__(self, monitors: dict[str, Monitor]):
        self.monitors = monitors
        self.last: dict[str, float] = {}
        """The newest value of every metric."""
        self._started: dict[str, Monitor] = {}

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any]) -> None:
        """Start all monitors. Raises PrlError naming one that cannot start, after closing those that did."""
        for name, monitor in self.monitors.items():
            try:
                monitor.start(run_dir, max_steps=max_steps, run_config=run_config)
            except Exception as error:
                self.close()
                raise failure(name, monitor, "start", error) from error
            self._started[name] = monitor

    def status(self, text: str) -> None:
        """Say what the run is doing now."""
        self._tell("status", lambda monitor: monitor.status(text))

    def step(self, line: dict[str, float]) -> None:
        """Record a step: `line` holds `step` and its metrics."""
        self.last |= line
        self._tell("step", lambda monitor: monitor.step(dict(line)))  # each its own: one may change it

    def close(self) -> None:
        """Close all monitors that were started. Failures are logged."""
        while self._started:
            name, monitor = self._started.popitem()
            try:
                monitor.close()
            except Exception as error:
                log.warning("%s", failure(name, monitor, "close", error))

    def _tell(self, what: str, call: Callable[[Monitor], None]) -> None:
        """Call every monitor, then raise PrlError for the first that failed."""
        failures = []
        for name, monitor in self._started.items():
            try:
                call(monitor)
            except Exception as error:
                failures.append((failure(name, monitor, what, error), error))
        if failures:
            first, cause = failures[0]
            raise first from cause


def failure(name: str, monitor: Monitor, what: str, error: Exception) -> PrlError:
    """The error of a monitor, with its config key and where its code raised it."""
    reason = str(error) if isinstance(error, PrlError) else of_own_code(error)
    return PrlError(f"monitor.{name}: {type(monitor).__name__}.{what} failed: {reason}")
