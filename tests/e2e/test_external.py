"""Runs on two nodes by `launcher=external`; the second is a command given on this machine, too."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_processes import command_line, family, left_in, running, scratch_of, wait_until

from prl.launch.external import FOLDER, INVITATION

pytestmark = pytest.mark.engine
NODES = ("launcher=external", "launcher.interface=lo")
BRIEF = ("orchestrator.batch_size=32", "orchestrator.eval.every=null", "checkpoint.every_minutes=null")
TWO_ENGINES = ("inference.urls=[]", "inference.servers=2", "inference.host=0.0.0.0")


class External:
    """A run and its second node, with all that they consist of."""

    def __init__(self, process, run_dir):
        self.run, self.dir = process, run_dir
        wait_until(self.invitation.exists, 120, self.said)
        self.token = json.loads(self.invitation.read_text())["token"]
        with run_dir.with_suffix(".node").open("w") as said:
            command = [sys.executable, "-m", "prl.launch.join", str(self.invitation)]
            self.node = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        self.below = {}

    @property
    def invitation(self):
        return self.dir / FOLDER / INVITATION

    def said(self):
        return self.dir.with_suffix(".stderr").read_text()

    def node_said(self):
        return self.dir.with_suffix(".node").read_text()

    def steps(self):
        path = self.dir / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    def begun(self, step=3):
        """Wait for a step, and learn which processes each side has."""
        wait_until(lambda: len(self.steps()) > step or not self.run.is_alive(), 200, self.said)
        assert self.run.is_alive(), self.said()
        self.below = {pid: family(pid) for pid in (self.run.pid, self.node.pid)}
        reapers = [pid for found in self.below.values() for pid, line in found.items() if "reaper.py" in line]
        self.scratch = {scratch_of(pid) for pid in reapers}

    def here(self, word):
        """How many processes of the node are a command of this module."""
        return sum(f"-m {word}" in line and "reaper.py" not in line for line in self.below[self.node.pid].values())

    def gone(self):
        every = [pid for found in self.below.values() for pid in found]
        wait_until(lambda: not any(map(running, every)), 15, lambda: [command_line(each) for each in every])
        wait_until(lambda: not any(map(left_in, self.scratch)), 15, "the removal of temporary files")


@pytest.fixture
def external(begin, tmp_path):
    """`external(*overrides)`: a run whose second node joins at once."""
    begun = []

    def start(*overrides):
        begun.append(External(begin(*NODES, *BRIEF, *overrides), tmp_path / "run"))
        return begun[-1]

    yield start
    for each in begun:
        each.node.kill()
        each.node.wait()


@pytest.mark.parametrize("transport", ["files", "broadcast"])
def test_an_engine_and_a_rank_on_a_node_that_has_joined_train_to_the_end(external, transport):
    run = external(*TWO_ENGINES, "trainer.num_processes=2", "max_steps=12", f"transport={transport}")
    run.begun()
    assert (run.here("prl.inference.server"), run.here("prl.trainer")) == (1, 1)
    assert len(run.scratch) == 2, "each node has a folder for temporary files of its own"
    everything = [line for found in run.below.values() for line in found.values()]
    assert not any(run.token in line for line in everything)
    wait_until(lambda: not run.run.is_alive(), 200, run.said)
    assert (run.run.exitcode, run.node.wait(30)) == (0, 0), run.said() + run.node_said()
    assert run.steps() == list(range(13))
    assert json.loads((run.dir / "result.json").read_text())["status"] == "completed"
    log = (run.dir / "logs" / "inference_2.log").read_text()
    assert "Application startup complete" in log
    assert "joined the run in" in run.node_said() and "the run has ended" in run.node_said()
    assert list((run.dir / FOLDER).iterdir()) == [], "neither invitation nor meeting"
    assert (run.dir / "batches").exists() == (transport == "files")
    run.gone()


def test_a_run_goes_on_without_the_engine_of_a_node_that_is_killed(external):
    run = external(*TWO_ENGINES, "inference.restarts=1", "max_steps=10000")
    run.begun()
    os.kill(run.node.pid, signal.SIGKILL)
    wait_until(lambda: "The run goes on without it, with inference" in run.said(), 30, run.said)
    assert f"node 2 ({os.uname().nodename}) is gone, and with it process 'inference 2'" in run.said()
    run.begun(len(run.steps()) + 3)
    os.kill(run.run.pid, signal.SIGTERM)
    wait_until(lambda: not run.run.is_alive(), 60, run.said)
    run.gone()


def test_a_node_that_is_killed_ends_the_run_which_names_it(external):
    run, process = external("trainer.num_processes=2", "max_steps=10000"), "trainer rank 1"
    run.begun()
    os.kill(run.node.pid, signal.SIGKILL)
    wait_until(lambda: not run.run.is_alive(), 30, run.said)
    error = json.loads((run.dir / "result.json").read_text())["error"]
    assert run.run.exitcode == 1
    assert error.startswith(f"node 2 ({os.uname().nodename}) is gone, and with it process '{process}'"), run.said()
    assert f"error: {error}" in run.said()
    run.gone()


def test_an_engine_that_dies_there_is_started_again_there(external):
    run = external(*TWO_ENGINES, "max_steps=10000")
    run.begun()
    [server] = [pid for pid, line in family(run.node.pid).items() if "reaper.py" not in line and "prl.infer" in line]
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: "inference 2 answers again" in run.said(), 120, run.said)
    where = f"process 'inference 2' on node 2 ({os.uname().nodename}) ended with status 137"
    assert f"{where} (killed by SIGKILL" in run.said() and "It is started again" in run.said()
    run.begun(len(run.steps()) + 3)
    assert run.here("prl.inference.server") == 1 and server not in run.below[run.node.pid]
    assert json.loads((run.dir / "metrics.jsonl").read_text().splitlines()[-1])["engine/restarts"] == 1
    os.kill(run.run.pid, signal.SIGTERM)
    wait_until(lambda: not run.run.is_alive(), 60, run.said)
    run.gone()


def test_a_killed_launcher_ends_what_runs_on_the_node(external):
    run = external("trainer.num_processes=2", "max_steps=10000")
    run.begun()
    os.kill(run.run.pid, signal.SIGKILL)
    assert run.node.wait(20) == 1
    assert "is gone: what it had started here has ended" in run.node_said()
    assert run.invitation.exists() and Path(run.invitation).stat().st_mode & 0o077 == 0
    run.gone()


def test_a_stopped_run_has_a_last_checkpoint_of_all_its_ranks_and_goes_on_with_another_node(external, begin, tmp_path):
    run = external("trainer.num_processes=2", "max_steps=10000")
    run.begun()
    os.kill(run.run.pid, signal.SIGTERM)
    wait_until(lambda: not run.run.is_alive(), 60, run.said)
    assert (run.run.exitcode, run.node.wait(30)) == (130, 0), run.said() + run.node_said()
    run.gone()
    [checkpoint] = (run.dir / "checkpoints").glob("step_*/manifest.json")
    step = int(checkpoint.parent.name.removeprefix("step_"))
    assert step >= 3
    again = external("run.resume=auto", "trainer.num_processes=2", f"max_steps={step + 5}")
    wait_until(lambda: not again.run.is_alive(), 120, again.said)
    assert (again.run.exitcode, again.node.wait(30)) == (0, 0), again.said() + again.node_said()
    assert again.steps() == list(range(step + 6))
