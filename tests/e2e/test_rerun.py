"""A run again from its directory, and a run inside a running loop, as in a notebook."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

SHORT = ("experiment=on_policy", "max_steps=1", "orchestrator.batch_size=64", "orchestrator.eval.every=null", "seed=5")
NOTEBOOK = """
import asyncio, sys
from prl.compose import compose
from prl.train import main

async def cell():
    result = main(compose(["run.name=cell", *sys.argv[1:]]))
    print(result.status, result.steps)

asyncio.run(cell())
"""


def said(run):
    """What the rollouts of the first step were asked and said."""
    return sorted(
        (record["group"], *(each["content"] for each in record["messages"][:2])) for record in run.rollouts(1)
    )


def test_a_run_again_sees_the_same_tasks_and_samples_the_same_replies(train, command, tmp_path):
    first = train(*SHORT)
    assert first.status == 0, first.stderr
    refused = train("--from", str(first.dir), name="again")
    assert refused.status == 2 and "inference.urls=" in refused.stderr and "--trust" in refused.stderr
    again = train("--from", str(first.dir / "config.yaml"), "--trust", name="again")
    assert again.status == 0, again.stderr
    assert said(again) == said(first)
    recorded = [json.loads((run.dir / "provenance.json").read_text()) for run in (first, again)]
    assert recorded[0]["data"] == recorded[1]["data"] and recorded[0]["models"] == recorded[1]["models"]

    argv, env = command(*SHORT, name="cell")
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, *argv[3:]], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "completed 1\n", done.stderr
