"""The interface of a monitor: what it receives of a run."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class Monitor(ABC):
    """Shows or stores the metrics of a run, one line per step, in order, beginning with step 0.

    Its constructor takes settings and nothing else; `start` hands it the run. A subclass must implement `step`; the
    other hooks are optional (hence the suppressed lint rule).
    """

    def check(self, where: str) -> None:  # noqa: B027
        """Raise ConfigError for settings that cannot work, or a package that is missing; `where` is its config key."""

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any]) -> None:  # noqa: B027
        """Open files and connections. Called once, before everything else but `check`.

        Args:
            run_dir: The run's directory; what the monitor writes belongs under it.
            max_steps: Training steps of the run.
            run_config: The resolved config, as plain data.
        """

    def status(self, text: str) -> None:  # noqa: B027
        """Show what the run is doing now, for a person who watches."""

    @abstractmethod
    def step(self, line: dict[str, float]) -> None:
        """Record a step: `line` holds `step` and its metrics. It belongs to the run: do not change it."""

    def close(self) -> None:  # noqa: B027
        """Finish. Called once if `start` returned, also after a failure."""
