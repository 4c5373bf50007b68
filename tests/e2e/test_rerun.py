"""A run again from its directory."""

import json

import pytest

from prl.config.compose import compose
from prl.train import main

pytestmark = pytest.mark.slow

SHORT = ("experiment=on_policy", "max_steps=1", "orchestrator.batch_size=64", "orchestrator.eval.every=null", "seed=5")


def test_a_run_again_from_its_directory_plays_the_same(inline, exchanges, tmp_path):
    """The second sees the same tasks and samples the same replies."""
    first = inline(*SHORT, name="first")
    assert first.status == 0, first.stderr
    again = tmp_path / "again"
    assert main(compose(["run.name=again", f"run.dir={again}"], first.dir)).status == "completed"
    assert exchanges(again) == exchanges(first.dir)
    recorded = [json.loads((folder / "provenance.json").read_text()) for folder in (first.dir, again)]
    assert recorded[0]["data"] == recorded[1]["data"] and recorded[0]["models"] == recorded[1]["models"]


def test_from_python_a_run_goes_on_by_its_folder_alone(inline):
    """With its own config, name and directory."""
    first = inline(*SHORT, name="a run")
    assert first.status == 0, first.stderr
    result = main(compose([f"run.resume={first.dir}", "max_steps=2"]))
    assert (result.status, result.steps) == ("completed", 2)
    assert [json.loads(line)["step"] for line in (first.dir / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
    [line] = (first.dir / "resumes.jsonl").read_text().splitlines()
    assert list(json.loads(line)["changed"]) == ["max_steps"]
