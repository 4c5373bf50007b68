"""The notebooks: each is what its script makes, and its cells run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SCRIPTS = {path.stem: path for path in EXPERIMENTS.glob("*.py") if path.read_text().startswith("# %% [markdown]\n")}
LEFT = {
    "tour": ["grpo", "opd"],
    "own_data": ["rl", "sft"],
    "tools_and_judge": ["grpo"],
    "why_did_it_fall": ["fell", "slower"],
    "one_step": [],
    "tinker_loop": ["0", "1"],
}
"""The runs that each leaves, by the ends of their folders' names."""


def cells_of(script):
    """Kind and content of each cell of a script in jupytext's percent format."""
    parts = re.split(r"^# %%(.*)\n", script, flags=re.MULTILINE)[1:]
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        if head.strip() == "[markdown]":
            yield "markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)
        else:
            yield "code", body.strip()


def notebook_of(name):
    return json.loads(SCRIPTS[name].with_suffix(".ipynb").read_text())["cells"]


def test_each_script_is_known():
    assert set(SCRIPTS) == set(LEFT) == {path.stem for path in EXPERIMENTS.glob("*.ipynb")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_notebook_has_the_cells_of_its_script(name):
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook_of(name)]
    assert found == list(cells_of(SCRIPTS[name].read_text())), "scripts/notebook makes it anew"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_notebook_was_run_and_shows_nothing_of_the_machine(name):
    code = [cell for cell in notebook_of(name) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shown = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in shown} <= {"stream", "execute_result", "display_data"} and shown
    assert not [output for output in shown if output.get("name") == "stderr"]
    assert not re.search(r"(?<![\w/<])/(tmp|home|root|usr|var|opt|work|mnt|Users)/", json.dumps(shown))
    assert SCRIPTS[name].with_suffix(".ipynb").stat().st_size < 150_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name != "own_data" else pytest.param(name, marks=pytest.mark.engine) for name in SCRIPTS]
)
def test_its_cells_run(name, tmp_path):
    """With few steps, but all of imitation: RL needs a reward to begin with."""
    script = re.sub(r"^(STEPS|RL_STEPS) = \d+$", r"\1 = 4", SCRIPTS[name].read_text(), flags=re.MULTILINE)
    env = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = {path.parent for path in (tmp_path / "outputs").rglob("result.json")} if LEFT[name] else set()
    assert sorted(re.split("[-/]", str(run))[-1] for run in runs) == LEFT[name]
