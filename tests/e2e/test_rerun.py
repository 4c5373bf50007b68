"""A run again from its directory."""

import json
import subprocess

import pytest

pytestmark = pytest.mark.slow

SHORT = ("experiment=on_policy", "max_steps=1", "orchestrator.batch_size=64", "orchestrator.eval.every=null", "seed=5")


def test_a_run_again_from_its_directory_plays_the_same(inline_command, said, tmp_path):
    """The second sees the same tasks and samples the same replies."""
    argv, env = inline_command(*SHORT, name="first")
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first = tmp_path / "first"
    again = tmp_path / "again"
    command = [*argv[:3], "--config-dir", str(first), "--config-name", "config", f"run.dir={again}"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert said(again) == said(first)
    recorded = [json.loads((folder / "provenance.json").read_text()) for folder in (first, again)]
    assert recorded[0]["data"] == recorded[1]["data"] and recorded[0]["models"] == recorded[1]["models"]
