"""A run that is killed, goes on, is stopped and goes on again has lost nothing and done nothing twice."""

import json
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prl.base.checkpoint_folders import checkpoint_path, steps_of, verify

pytestmark = pytest.mark.slow

KNOBS = (
    "checkpoint.every=2",
    "orchestrator.batch_size=64",
    "orchestrator.eval.every=3",
    "orchestrator.eval.num_tasks=8",
)


@pytest.fixture
def command(inline_command):
    """Of `train` too: a run is one process here, which a signal ends at once."""
    return inline_command


def lines_of(run_dir):
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def kept(line):
    """What a run that goes on after its last step keeps of that step's line.

    Its engines have started with the last version, which is not loaded again but may be evaluated again.
    """
    return {key: value for key, value in line.items() if key != "time/update_weights" and not key.startswith("eval/")}


@pytest.fixture
def train_until(begin, tmp_path):
    """`train_until(step, number, *overrides)`: send a run a signal once it has recorded `step`; status and stderr."""

    def run(step, number, *overrides):
        process, stderr = begin(*overrides), tmp_path / "run.stderr"
        deadline = time.monotonic() + 120
        while not any(line["step"] >= step for line in lines_of(tmp_path / "run")):
            assert process.is_alive(), stderr.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, number)
        process.join(60)
        return process.exitcode, stderr.read_text()

    return run


def test_killed_stopped_and_gone_on(train_until, train, tmp_path):
    folder = tmp_path / "run"
    train_until(5, signal.SIGKILL, *KNOBS, "max_steps=1000")
    assert not (folder / "result.json").exists() and verify(checkpoint_path(folder, steps_of(folder)[-1])) >= 2

    status, stderr = train_until(9, signal.SIGTERM, *KNOBS, "max_steps=1000", "run.resume=auto")
    assert (
        status == 143 and "going on after step" in stderr and "stopping: the trainer writes a last checkpoint" in stderr
    )
    stopped = steps_of(folder)[-1]
    assert stopped >= 9 and f"run.resume={folder}" in stderr
    assert json.loads((folder / "result.json").read_text())["status"] == "stopped"

    run = train("run.resume=" + str(folder), f"max_steps={stopped + 2}")
    assert run.status == 0, run.stderr
    assert f"max_steps: 1000 → {stopped + 2}" in run.stderr
    assert [line["step"] for line in run.steps] == list(range(stopped + 3))
    evaluated = [line["step"] for line in run.steps if "eval/math/avg@1" in line]
    assert evaluated == sorted({*range(0, stopped + 3, 3), stopped + 2})
    regular = [step for step in (stopped + 1,) if step % 2 == 0]  # checkpoint.every
    assert steps_of(folder) == [stopped, *regular, stopped + 2][-2:]

    played = {}
    for path in sorted((folder / "rollouts").glob("step_*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            assert (record["group"], record["rollout"]) not in played, "no rollout is there twice"
            played[record["group"], record["rollout"]] = record["task"]
    groups = {group for group, _ in played}
    assert groups == set(range(max(groups) + 1)), "and no task was skipped"
    order = [played[group, 0] for group in sorted(groups)]
    assert len(set(order)) == len(order), "within the first pass no task comes twice"

    last = checkpoint_path(folder, stopped + 2)
    model = AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
    saved = load_file(last / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in saved.items())
    resumes = [json.loads(line) for line in (folder / "resumes.jsonl").read_text().splitlines()]
    assert [line["step"] for line in resumes][1:] == [stopped] and len(resumes) == 2

    done = train("run.resume=auto", *KNOBS, f"max_steps={stopped + 2}")
    assert done.status == 0 and "is completed already" in done.stderr

    before = done.result
    (folder / "result.json").unlink()  # as if it had been killed after its last checkpoint
    late = train("run.resume=auto", *KNOBS, f"max_steps={stopped + 2}")
    assert (late.status, late.result["status"], late.result["steps"]) == (0, "completed", before["steps"])
    assert late.steps[:-1] == done.steps[:-1]
    assert kept(late.steps[-1]) == kept(done.steps[-1])
    assert late.steps[-1].keys() - done.steps[-1].keys() == set() and "eval/math/avg@1" in late.steps[-1]


def test_run_without_reward_leaves_a_checkpoint(inline, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        "".join(json.dumps({"prompt": f"say {n}", "answer": f"nothing like {n}"}) + "\n" for n in "abcdefgh")
    )
    env = ("env=jsonl", f"envs.jsonl.args.path={tasks}", "envs.jsonl.args.eval_fraction=0.25", "sampling.max_tokens=8")
    short = ("orchestrator.batch_size=8", "max_steps=2")
    run = inline(*env, *short)
    assert run.status == 1 and run.result["status"] == "failed" and run.result["steps"] == 0
    assert run.stderr.count("Every reward is 0") == 3, "after the first evaluation, the first batch, and at the end"
    assert steps_of(tmp_path / "run") == [0] and verify(checkpoint_path(tmp_path / "run", 0)) == 0
    again = inline(*env, *short, f"run.resume={tmp_path / 'run'}", "filters=none")
    assert again.status == 0, again.stderr
    assert [line["step"] for line in again.steps] == [0, 1, 2]


FAILS = """
from prl.algorithms.grpo import GRPOAlgorithm

class Fails(GRPOAlgorithm):
    groups = 0

    def score_group(self, group):
        Fails.groups += 1
        if Fails.groups > 20:
            raise RuntimeError("none of mine")
        return super().score_group(group)
"""


@pytest.mark.parametrize("how", [(), ("launcher=local", "trainer.num_processes=2")], ids=["a thread", "two ranks"])
def test_run_whose_code_fails_goes_on_after_its_last_step(inline, tmp_path, how):
    (tmp_path / "own_algorithm.py").write_text(FAILS)
    how = (*how, "orchestrator.batch_size=16", "orchestrator.eval.every=null", "algo=custom_class")
    run = inline(*how, "algo._target_=own_algorithm.Fails", "max_steps=1000")
    assert run.status == 1 and "none of mine" in run.result["error"] and run.result["status"] == "failed"
    assert "the run fails: the trainer writes a last checkpoint" in run.stderr
    (last,) = steps_of(run.dir)
    assert last >= max(2, run.result["steps"]) and f"go on with: python -m prl.train run.resume={run.dir}" in run.stderr

    end = ("algo._target_=prl.algorithms.grpo.GRPOAlgorithm", f"max_steps={last + 2}")
    again = inline(*how, *end, f"run.resume={run.dir}")
    assert again.status == 0, again.stderr
    assert [line["step"] for line in again.steps] == list(range(last + 3))
    places = []
    for path in sorted((run.dir / "rollouts").glob("step_*.jsonl")):
        places += [(record["group"], record["rollout"]) for record in map(json.loads, path.read_text().splitlines())]
    assert len(set(places)) == len(places), "no rollout is there twice"
    assert set(range(18)) <= {group for group, _ in places}, "and none that was played before it failed is skipped"


def test_fork_trains_as_its_source_did(inline, tmp_path):
    on_policy = ("orchestrator.batch_size=16", "orchestrator.max_async_level=0", "orchestrator.eval.every=null")
    short = ("max_steps=3", "checkpoint.every=1", "checkpoint.keep_last=3")
    source = inline(*on_policy, *short)
    assert source.status == 0, source.stderr
    there = checkpoint_path(tmp_path / "run", 1)
    fork = inline(*on_policy, *short, f"run.fork={there}", name="fork")
    assert fork.status == 0, fork.stderr
    assert [line["step"] for line in fork.steps] == [2, 3]
    for ours, theirs in zip(fork.steps, source.steps[2:], strict=True):
        assert ours["reward/all/mean"] == theirs["reward/all/mean"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_a_run_without_tasks_goes_on_without_a_line(inline):
    tasks = ("env=reverse_text", "envs.reverse_text.args.num_tasks=16", "orchestrator.eval.every=null", "max_steps=20")
    pools = (
        "curriculum=pools",
        "curriculum.refill=false",
        "curriculum.easy_threshold=0.9",
        "curriculum.hard_threshold=0.8",
    )
    run = inline(*tasks, *pools)
    assert run.status == 0 and run.result["ended_because"].startswith("every env has run out of tasks"), run.stderr
    again = inline(*tasks, *pools, f"run.resume={run.dir}", "trainer.optim.lr=1e-5")
    assert again.status == 0 and [line["step"] for line in again.steps] == [line["step"] for line in run.steps]
