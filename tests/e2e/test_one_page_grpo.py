"""The page and a run take the same steps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "one_page_grpo"
LINE = re.compile(r"step \d+  reward=(\S+)  loss=(\S+)  grad_norm=(\S+)")
RUN = ("debug=fast", "filters=none", "schedule=constant", "orchestrator.batch_size=32", "orchestrator.group_size=4")


@pytest.mark.slow
def test_first_steps_are_those_of_a_run(inline):
    command = [sys.executable, str(SCRIPT), "--steps", "3", "--groups", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    page = [[float(number) for number in line] for line in LINE.findall(done.stdout)]
    run = inline(*RUN, "max_steps=3")
    columns = [run.column(name) for name in ("reward/all/mean", "loss/mean", "grad_norm")]
    for line, expected in zip(page, zip(*columns, strict=True), strict=True):
        assert line == pytest.approx(list(expected), abs=2e-5)


def test_it_is_one_page():
    assert len(SCRIPT.read_text().splitlines()) < 250
