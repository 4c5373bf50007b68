"""scripts/gpu_check: its small form, and what it says of parts that fail."""

import importlib
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch
from gpu_parts import NO_ROOM, OK, WRONG, exactness, steps
from packaging.requirements import Requirement

from prl.rollouts.packing import pack_row
from prl.trainer.tree import flex, tree

ROOT = Path(__file__).parents[1]
CHECK = SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu_check")).load_module()
WHEELS = (ROOT / "scripts" / "gpu_parts" / "wheels.txt").read_text().splitlines()[2:]


def test_wheels_are_of_the_locked_versions():
    locked = (ROOT / "scripts" / "locks" / "gpu.txt").read_text()
    pinned = {line.split()[0] for line in locked.splitlines() if "==" in line}
    assert len(WHEELS) > 30 and set(WHEELS) <= pinned


@pytest.mark.parametrize(("device", "small", "count"), [("cuda", False, 10), ("cuda", True, 6), ("cpu", True, 6)])
def test_each_part_takes_its_arguments(device, small, count):
    calls = [call for jobs in CHECK.jobs_of(device, small=small) for job in jobs for call in job.calls]
    for name, options in calls:
        module, function = name.split(".")
        inspect.signature(getattr(importlib.import_module(f"gpu_parts.{module}"), function)).bind(**options)
    assert len(calls) == count


def test_parts_that_fail_or_hang_are_rows(tmp_path):
    """What they found before is kept, and the others go on."""
    shutil.copytree(ROOT / "scripts" / "gpu_parts", tmp_path / "gpu_parts")
    (tmp_path / "gpu_parts" / "toy.py").write_text(
        "import subprocess\n"
        "from gpu_parts import row\n"
        "def check(*, then):\n"
        "    yield row('counted', 'two', 'two', True)\n"
        "    if then == 'hang': subprocess.run(['sleep', '98765'])\n"
        "    if then == 'fail': raise ValueError('no such kernel')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    jobs = [CHECK.Job(limit, [("toy.check", {"then": then})]) for then, limit in (("fail", 60), ("hang", 3), ("", 60))]
    rows = CHECK.run(jobs, time.monotonic() + 60, environment)
    assert [each.result for each in rows] == [OK, WRONG, OK, WRONG, OK]
    assert "fail" in rows[1].check and "exit 1" in rows[1].measured and "no such kernel" in rows[1].measured
    assert "hang" in rows[3].check and rows[3].measured == "not finished after 3 s"
    assert "98765" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    (late,) = CHECK.run(jobs[:1], time.monotonic(), environment)
    assert (late.measured, late.result) == ("not finished after 0 s", WRONG)


def test_a_step_that_does_not_fit_is_a_row(monkeypatch):
    """On a card of 8 GiB: nothing is asked of it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7 << 30, 8 << 30))
    calls = [options for jobs in CHECK.jobs_of("cuda", small=False) for job in jobs for name, options in job.calls]
    taken = [options for options in calls if "tokens" in options]
    assert len(taken) == len(CHECK.STEPS)
    for options in taken:
        (row,) = steps.check(**options)
        assert row.result == NO_ROOM and re.fullmatch(r"predicted [\d.]+ GiB, of 7\.0 that are free", row.measured)


def test_rows_attend_as_they_are_called(monkeypatch):
    """What a GPU would take for each way."""
    monkeypatch.setattr(flex, "LONG", exactness.LONG)
    monkeypatch.setattr(tree, "row_tree", flex.row_on_gpu)
    kinds, tokens = [], []
    for share, prompts, completions in exactness.WAYS.values():
        rows = [pack_row(exactness.draw(300, prompts, completions), exactness.TOKENS)]
        (stack,) = tree.tree_stacks(rows, exactness.TOKENS, torch.device("cpu"), share=share)
        kinds.append(type(stack.tree))
        tokens.append(stack.forward_tokens)
    assert kinds == [flex.FlexTree, flex.FlexTree, flex.LongSequences]
    assert tokens[0] - tokens[1] == 2 * 3 * 150, "three of four completions share a prompt with the first"


def test_differences_are_seen():
    """Gradients by their norm, here 5."""

    def found(logprob=-1.0, loss=0.5, gradient=4.0):
        return exactness.Found(torch.tensor([logprob, -2.0]), loss, {"weight": torch.tensor([3.0, gradient])})

    cases = {
        "float32": [
            (found(), OK),
            (found(-1.00002), WRONG),
            (found(loss=0.50002), WRONG),
            (found(gradient=4.0001), WRONG),
        ],
        "bfloat16": [(found(-1.03, 0.51, 4.4), OK), (found(-1.05), WRONG), (found(gradient=4.6), WRONG)],
    }
    for dtype, pairs in cases.items():
        for each, expected in pairs:
            assert exactness.compared("", dtype, each, found()).result == expected
    row = exactness.compared("", "float32", found(-1.03, gradient=4.5), found())
    assert row.numbers == pytest.approx({"logprobs": 0.03, "mean": 0.015, "loss": 0.0, "gradients": 0.1}, rel=1e-4)


def linked(folder: Path, names: list[str]) -> Path:
    """The Python of a new environment at `folder`, which has these distributions of this one alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in names:
        for top in {file.parts[0] for file in importlib.metadata.files(name)} - {"..", "__pycache__"}:
            target = Path(importlib.metadata.distribution(name).locate_file(top))
            if not (site / top).exists():
                (site / top).symlink_to(target)
    return folder / "bin" / "python"


def asked_for(*names: str) -> set[str]:
    """These distributions, and what they ask for."""
    wanted, found = list(names), set[str]()
    while wanted:
        name = wanted.pop()
        if name not in found:
            found.add(name)
            needs = map(Requirement, importlib.metadata.requires(name) or [])
            wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_the_small_form_on_a_bare_machine(tmp_path):
    """With torch, transformers and the wheels alone: all of it is there and as expected."""
    small = [line.split("==")[0] for line in WHEELS] + ["antlr4-python3-runtime"]
    python = linked(tmp_path / "bare", [*asked_for("torch", "transformers"), *small])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, ROOT / "scripts" / "gpu_check", "--out", tmp_path / "out"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    checks = [each["check"] for each in found["rows"]]
    for part in (
        "prefix trees",
        "FlexAttention",
        "time: ",
        "peak: ",
        "reward",
        "engine against trainer",
    ):
        assert any(part in check for check in checks), part
    assert {each["result"] for each in found["rows"]} == {OK, "measured"}
    page = (tmp_path / "out" / "gpu_check.md").read_text()
    assert "No GPU was at hand" in page and all(f"| {check} |" in page for check in checks)
    assert not list((tmp_path / "bare").glob("lib/python*/site-packages/pandas"))
