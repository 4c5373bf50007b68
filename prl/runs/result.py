"""The result of a run: `result.json` in its directory."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from prl.base.files import read_json, write_atomically
from prl.base.masking import masked_text


class RunResult(msgspec.Struct):
    """The content of `result.json`."""

    status: str = "failed"
    """completed, failed, stopped or refused."""
    error: str | None = None
    ended_because: str | None = None
    """Why the run ended before `max_steps`; null where it did not."""
    steps: int = 0
    seconds: float = 0.0
    reward_without_signal: float | None = None
    """The mean reward of the batches that trained nothing and so ended the run; null where none did."""
    metrics: dict[str, float | None] = {}
    """The newest value of every metric."""
    optimized_metric: float | None = None
    """Objective that a sweep compares its jobs by; null where the run is no job of one, or has no such metric."""

    @property
    def has_ended(self) -> bool:
        """The run came to an end: one on Ray has a result from the start."""
        return self.seconds != 0

    def take(self, last: Mapping[str, float | None]) -> None:
        """Take the steps and the metrics from the newest value of each, the step among them."""
        self.steps = int(last.get("step") or 0)
        self.metrics = {key: value for key, value in last.items() if key != "step"}


def read_result(run_dir: Path) -> RunResult | None:
    """The run's `result.json`; None where there is none. Raises ConfigError for one that is damaged."""
    path = run_dir / "result.json"
    return read_json(path, RunResult) if path.is_file() else None


def write_result(run_dir: Path, result: RunResult) -> None:
    """Write the run's `result.json`."""
    # An error may quote a URL with its password, or what a server has answered.
    shown = msgspec.structs.replace(result, error=result.error and masked_text(result.error))
    write_atomically(run_dir / "result.json", msgspec.json.format(msgspec.json.encode(shown)) + b"\n", durable=True)
