"""Metrics as a file: `metrics.jsonl` in the run directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prl.base.files import naming
from prl.monitors.base import Monitor


@dataclass(kw_only=True, eq=False)
class JsonLines(Monitor):
    """Appends one JSON object per step to `metrics.jsonl`; it is in the file when `step` returns, and on disk before
    the next checkpoint appears."""

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any], resumed_at: int = 0) -> None:
        path = run_dir / "metrics.jsonl"
        with naming(path):
            # Unbuffered: a run that is killed leaves every line that it recorded.
            self._file = path.open("ab", buffering=0)

    def step(self, line: dict[str, float]) -> None:
        with naming(Path(self._file.name)):
            self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()
