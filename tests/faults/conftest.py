"""Each test that breaks something tells what came of it: a row of the table that `table.py` prints."""

import json
import os
from pathlib import Path

import pytest

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
