"""The experiments' scripts without their engines: each runs to its end and asks for nothing that would be refused."""

import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from prl.config.compose import compose
from prl.config.validate import validate
from prl.launch.components import build_components

SCRIPTS = sorted(Path(__file__).parents[1].glob("experiments/*/run"))
RECORDER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    print(json.dumps([os.environ.get("PYTHONPATH", ""), *sys.argv[1:]]), file=file)
"""


def jobs(overrides: list[str]) -> list[list[str]]:
    """The overrides of a sweep's first and last job, with the first seed."""
    choices = [
        [f"{override.input_line.partition('=')[0]}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override() and override.key_or_group != "seed"
        else [override.input_line.replace("seed=0,1,2", "seed=0")]
        for override in OverridesParser.create().parse_overrides(overrides)
    ]
    first, *rest = itertools.product(*choices)
    return [list(job) for job in (first, *rest[-1:])]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.parent.name)
def test_script_asks_for_what_there_is(script, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "CALLS": str(tmp_path / "calls")}
    subprocess.run([script, "max_steps=7"], env=environment, check=True, capture_output=True, timeout=20)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    sweeps = [(path, arguments[3:]) for path, *arguments in calls if arguments[:3] == ["-m", "prl.train", "-m"]]
    reports = [arguments[3:] for _, *arguments in calls if arguments[:3] == ["-m", "prl", "report"]]
    assert sweeps and all("seed=0,1,2" in overrides for _, overrides in sweeps)
    folders = {
        f"outputs/{override.partition('=')[2]}" for _, given in sweeps for override in given if "run.name=" in override
    }
    [reported] = reports
    assert folders <= set(reported) and f"experiments/{script.parent.name}" in reported
    assert (script.parent / "README.md").exists()
    for path, overrides in sweeps:
        for folder in filter(None, path.split(os.pathsep)):
            monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "credit", raising=False)
        for job in jobs(overrides):
            config = compose(job)
            assert config.max_steps == 7
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                validate(config)
                build_components(config)


def test_there_are_scripts():
    assert len(SCRIPTS) >= 8
