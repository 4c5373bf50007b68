"""The interface of a monitor, what it receives of a run, and the monitors of a run as one."""

import copy
import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from prl.base.errors import ConfigError, PrlError, of_disk, of_own_code

log = logging.getLogger(__name__)


class Monitor(ABC):
    """Shows or stores the metrics of a run, one line per step, in order, beginning with step 0.

    Its constructor takes settings and nothing else; `start` hands it the run. A subclass must implement `step`; the
    other hooks are optional (hence the suppressed lint rule).
    """

    needs_package: ClassVar[str | None] = None
    """An optional package, which the extra of the same name installs."""

    def check(self, where: str) -> None:
        """Raise ConfigError for settings that cannot work, or a package that is missing; `where` is its config key."""
        package = self.needs_package
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{where} needs the package {package}: pip install 'prl[{package}]'")

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any], resumed_at: int = 0) -> None:  # noqa: B027
        """Open files and connections. Called once, before everything else but `check` and before the event loop.

        Args:
            run_dir: The run's directory; what the monitor writes belongs under it.
            max_steps: Training steps of the run.
            run_config: The resolved config, as plain data.
            resumed_at: The step that the run goes on from; 0 for a new run. Lines after it may have been seen.
        """

    def status(self, text: str) -> None:  # noqa: B027
        """Show what the run is doing now, for a person who watches."""

    @abstractmethod
    def step(self, line: dict[str, float]) -> None:
        """Record a step: `line` holds `step` and its metrics. It belongs to the run: do not change it."""

    def close(self) -> None:  # noqa: B027
        """Finish. Called once if `start` returned, also after a failure."""


class Monitors:
    """Hands each step to every monitor of the run.

    A monitor that fails ends the run: metrics that stop unnoticed are worse than a run that stops. Only while closing,
    when nothing is left to save, a failure is a warning.
    """

    def __init__(self, monitors: dict[str, Monitor]):
        self.monitors = monitors
        self.last: dict[str, float] = {}
        """The newest value of every metric."""
        self._started: dict[str, Monitor] = {}

    def start(
        self,
        run_dir: Path,
        *,
        max_steps: int,
        run_config: dict[str, Any],
        resumed_at: int = 0,
        last: Mapping[str, float] | None = None,
    ) -> None:
        """Start all monitors. Raises PrlError naming one that cannot start, after closing those that did.

        `last` has the newest value of every metric in an earlier part of the run. The rest is as of `Monitor.start`.
        """
        self.last |= last or {}
        for name, monitor in self.monitors.items():
            try:
                monitor.start(run_dir, max_steps=max_steps, run_config=run_config, resumed_at=resumed_at)
            except BaseException as error:  # it may be the user's own class (`prl.base.user_code.called`)
                self.close()
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise failure(name, monitor, "start", error) from error
            self._started[name] = monitor

    def status(self, text: str) -> None:
        """Say what the run is doing now."""
        self._tell("status", text)

    def step(self, line: dict[str, float]) -> None:
        """Record a step: `line` holds `step` and its metrics."""
        self.last |= line
        self._tell("step", line)

    def close(self) -> None:
        """Close all monitors that were started. Failures are logged."""
        while self._started:
            name, monitor = self._started.popitem()
            try:
                monitor.close()
            except BaseException as error:
                log.warning("%s", failure(name, monitor, "close", error))

    def _tell(self, hook: str, value: Any) -> None:
        """Call this hook of one monitor after the other. Raises PrlError for the first that fails."""
        for name, monitor in self._started.items():
            try:
                getattr(monitor, hook)(copy.copy(value))  # each its own: one may change it
            except BaseException as error:
                raise failure(name, monitor, hook, error) from error


def failure(name: str, monitor: Monitor, hook: str, error: BaseException) -> PrlError:
    """The error of a monitor, with its config key and where its code raised it."""
    reason = str(error) if isinstance(error, PrlError) else of_disk(error) or of_own_code(error)
    return PrlError(f"monitor.{name}: {type(monitor).__name__}.{hook} failed: {reason}")
