"""Runs of a few steps, below one folder, which is what a page watches."""

import json

import pytest
from made_run import make_run


@pytest.fixture
def folder(tmp_path):
    """Two completed runs of three steps."""
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, steps=3, rollouts=16, tokens_at=(3,))
    return tmp_path / "runs"


@pytest.fixture
def append():
    """`append(run, {"step": 4, …})`: a line of metrics, whole or the beginning of one."""

    def write(run, line, end="\n"):
        with (run / "metrics.jsonl").open("a") as file:
            file.write((line if isinstance(line, str) else json.dumps(line)) + end)

    return write
