"""The notebook: it is what its script makes, and its cells run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[1] / "experiments" / "tour.py"
NOTEBOOK = TOUR.with_suffix(".ipynb")


def cells_of(script):
    """Kind and content of each cell of a script in jupytext's percent format."""
    parts = re.split(r"^# %%(.*)\n", script, flags=re.MULTILINE)[1:]
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        if head.strip() == "[markdown]":
            yield "markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)
        else:
            yield "code", body.strip()


def test_the_notebook_has_the_cells_of_its_script():
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
    assert found == list(cells_of(TOUR.read_text())), "scripts/notebook makes it anew"


def test_the_notebook_was_run_and_shows_nothing_of_the_machine():
    code = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shown = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in shown} == {"stream", "execute_result", "display_data"}
    assert not re.search(r"(?<![\w/])/(tmp|home|root|usr|var|opt|work|mnt|Users)/", json.dumps(shown))
    assert NOTEBOOK.stat().st_size < 150_000


@pytest.mark.slow
def test_its_cells_run(tmp_path):
    script, changed = re.subn(r"^STEPS = \d+$", "STEPS = 2", TOUR.read_text(), flags=re.MULTILINE)
    assert changed == 1
    env = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {run.name.rpartition("-")[2] for run in (tmp_path / "outputs").iterdir()} == {"grpo", "opd"}
