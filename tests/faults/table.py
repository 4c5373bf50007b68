"""Break things, and print what came of each: the fault tests in a pytest of their own, and their rows as one table.

python tests/faults/table.py [pytest arguments]        all of them, or what the arguments choose: -k trainer
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prl.text import safe

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
COLUMNS = {
    "fault": "fault",
    "phase": "phase",
    "happened": "what happened",
    "noticed_s": "s to notice",
    "left": "what was left",
    "resumed": "went on",
}


def main(pytest_arguments: Sequence[str] = ()) -> int:
    """Run the fault tests, those marked `chaos` as well, print the table, and return pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="prl-faults-") as folder:
        rows = Path(os.environ.get("PRL_FAULT_TABLE") or f"{folder}/rows.jsonl")
        environment = {**os.environ, "PRL_FAULT_TABLE": str(rows)}
        command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), str(FOLDER), "-q"]
        status = subprocess.run([*command, *pytest_arguments], cwd=ROOT, env=environment, check=False).returncode
        show(read_rows(rows))
    return status


def read_rows(path: Path) -> list[dict[str, object]]:
    """The rows of the tests that have ended; none where no test has a row."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(rows: Sequence[dict[str, object]]) -> None:
    """Print the rows, and how many had each outcome."""
    table = Table(*COLUMNS.values(), title=f"{len(rows)} faults")
    for row in rows:
        table.add_row(*(cell(row.get(key)) for key in COLUMNS))
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    console.print(table)
    ends = Counter(str(row.get("happened")).partition(":")[0].partition(";")[0] for row in rows)
    for end, count in ends.most_common():
        console.print(f"{count:4}  {safe(end)}")


def cell(value: object) -> str:
    """A value as the table has it."""
    return {True: "yes", False: "no", None: "–"}.get(value, safe(str(value)))  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
