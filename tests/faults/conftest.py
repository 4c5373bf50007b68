"""Each test that breaks something tells what came of it: a row of the table that `table.py` prints."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
from engines import Run, finished
from run_processes import family, left_in, running, scratch_of, wait_until

VARIABLE = "PRL_FAULT_TABLE"


@pytest.fixture
def outcome():
    """`outcome(fault=…, phase=…, happened=…, noticed_s=…, left=…, resumed=…)`: one row, where a table is asked for."""

    def record(
        *, fault: str, phase: str, happened: str, noticed_s: float | None, left: str, resumed: str | bool
    ) -> None:
        row = {
            "fault": fault,
            "phase": phase,
            "happened": happened,
            "noticed_s": None if noticed_s is None else round(noticed_s, 1),
            "left": left,
            "resumed": resumed,
        }
        if path := os.environ.get(VARIABLE):
            with Path(path).open("a") as table:
                table.write(json.dumps(row, ensure_ascii=False) + "\n")

    return record


class Watched:
    """A run in the background, and what it consists of."""

    def __init__(self, process, folder: Path, stderr: Path):
        self.process, self.dir, self.stderr = process, folder, stderr
        self.family: dict[int, str] = {}
        self.scratch: Path | None = None

    def look(self) -> bool:
        """Learn of its processes. Returns whether it runs."""
        self.family |= family(self.process.pid)
        supervisors = [pid for pid, line in self.family.items() if "children.py" in line]
        if self.scratch is None and supervisors:
            with contextlib.suppress(OSError):
                self.scratch = scratch_of(supervisors[0])
        return self.process.is_alive()

    @property
    def steps(self) -> list[dict]:
        path = self.dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, condition, timeout: float, what: str) -> None:
        """Wait for something that happens while the run lives."""

        def happened() -> bool:
            assert self.look() or condition(), self.stderr.read_text()
            return condition()

        wait_until(happened, timeout, what, pause_s=0.2)

    def ended(self, timeout: float) -> tuple[int, str]:
        """Its status and what it said, once it has ended by itself."""
        wait_until(lambda: not self.look(), timeout, f"the end of the run that writes {self.stderr}", pause_s=0.1)
        self.process.join()
        return self.process.exitcode, self.stderr.read_text()

    def whole(self, timeout: float = 240) -> Run:
        """Everything of it, once it has ended by itself."""
        return finished(self.dir, *self.ended(timeout))

    @property
    def left(self) -> str:
        """What is left of it in words, ten seconds later at the latest."""
        deadline = time.monotonic() + 10
        while True:
            found = [f"process {line[:60]}" for pid, line in self.family.items() if running(pid)]
            found += [] if self.scratch is None else left_in(self.scratch)
            if not found or time.monotonic() > deadline:
                return ", ".join(found) or "nothing"
            time.sleep(0.1)


@pytest.fixture
def watched(begin, tmp_path):
    """`watched(*overrides)`: a run on the shared engine that is watched from outside."""

    def start(*overrides: str, name: str = "run") -> Watched:
        return Watched(begin(*overrides, name=name), tmp_path / name, tmp_path / f"{name}.stderr")

    return start
