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
