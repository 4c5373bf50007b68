"""Whole runs over the nodes of a Ray cluster, which see nothing of the run's directory and end in mid-run."""

import json
import os
import signal
import subprocess
import sys

import pytest
from ray_nodes import ray_nodes
from run_processes import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OVERRIDES = (
    *("launcher=ray", "run.resume=auto", "monitor.console.mode=plain", "checkpoint.every=1"),
    *("orchestrator.batch_size=32", "orchestrator.eval.every=null"),
)
ENDS_S = 240.0
"""[s] Deadline for a run that has lost a rank to end, on a busy machine. A collective would wait for an hour."""


@pytest.fixture
def nodes():
    with ray_nodes() as nodes:
        nodes.add("head", 0)
        yield nodes


@pytest.fixture
def begin(nodes, tmp_path):
    """Begin a run that is driven from the head; returns its process, and what reads its lines of metrics."""
    folder = tmp_path / "runs" / "one"
    begun = []

    def steps():
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")][1:]  # less step 0

    def run(*overrides):
        command = [sys.executable, "-m", "prl.train", f"run.dir={folder}", *OVERRIDES, *overrides]
        env = os.environ | nodes.environment | {"OMP_NUM_THREADS": "1"}
        log = (tmp_path / f"{len(begun)}.log").open("w+")
        begun.append(subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=tmp_path))
        return begun[-1], steps, tmp_path / f"{len(begun) - 1}.log"

    folder.parent.mkdir()
    yield run
    for process in begun:
        process.kill()
        process.wait()


def trained(process, steps, count, log):
    """Wait until a run has trained so many steps."""

    def further():
        assert process.poll() is None, log.read_text()
        return len(steps()) >= count

    wait_until(further, 240, log.read_text)


def nothing_runs(nodes):
    wait_until(lambda: not nodes.left(), 120, nodes.left)


@pytest.mark.parametrize("weights", ["ray", "transfer"])
def test_an_engine_that_is_lost_with_its_node_is_started_elsewhere(nodes, begin, tmp_path, weights):
    for name in ("one", "two", "three"):
        nodes.add(name, 1, blind_to=tmp_path / "runs")
    process, steps, log = begin("max_steps=8", f"weights={weights}")
    trained(process, steps, 2, log)
    (node,) = set(nodes.running("prl.engines.vllm.server").values())
    nodes.kill(node)
    assert process.wait(240) == 0, log.read_text()
    nothing_runs(nodes)
    lines = steps()
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[0]["logprob_gap/mean"] < 1e-5, "the engine's logprobs are the trainer's"
    assert not list((tmp_path / "runs" / "one" / "checkpoints").glob(".step_*")), "each part became a checkpoint"
    assert lines[-1]["engine/restarts"] == 1 and "process 'engine' is lost with node " in log.read_text()
    assert lines[-1]["reward/all/mean"] > lines[0]["reward/all/mean"]


def test_a_run_that_loses_a_rank_or_its_driver_goes_on(nodes, begin, tmp_path):
    nodes.add("one", 2, blind_to=tmp_path / "runs")
    nodes.add("two", 1, blind_to=tmp_path / "runs")
    process, steps, log = begin("max_steps=50", "weights=ray", "trainer.num_processes=2")
    trained(process, steps, 3, log)
    assert set(nodes.running("prl.trainer").values()) == {"one", "two"}
    nodes.kill("two")
    assert process.wait(ENDS_S) == 1, log.read_text()
    assert "error: process 'trainer rank 1' is lost with node " in log.read_text()
    nothing_runs(nodes)

    before = {line["step"]: line for line in steps()}
    nodes.add("four", 1, blind_to=tmp_path / "runs")
    process, steps, log = begin("max_steps=50", "weights=ray", "trainer.num_processes=2")
    trained(process, steps, len(before) + 2, log)
    process.send_signal(signal.SIGKILL)
    nothing_runs(nodes)
    lines = steps()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "nothing is skipped or repeated"
    assert "going on after step" in log.read_text()
