"""The rows that tests tell become one table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOSTILE = "error: \x1b]0;owned\x07 [bold]no markup"
TELLING = f"""
def test_told(outcome):
    said = {HOSTILE!r}
    outcome(fault="SIGKILL trainer", phase="packing", happened=said, noticed_s=1.26, left="nothing", resumed=True)
"""


@pytest.mark.slow
def test_rows_are_printed_and_the_status_is_that_of_the_tests(tmp_path):
    (tmp_path / "test_telling.py").write_text(TELLING)
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    table = Path(__file__).with_name("table.py")
    env = {name: value for name, value in os.environ.items() if name != "PRL_FAULT_TABLE"}
    choose = [sys.executable, str(table), "-k", "test_told", str(tmp_path)]
    done = subprocess.run(choose, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if "SIGKILL trainer" in line)
    assert all(cell in row for cell in ("packing", "1.3", "nothing", "yes", "[bold]no markup"))
    assert "\x1b" not in done.stdout and "   1  error" in done.stdout
