"""Runs whose weights pass from the trainer to the engines (`transport=broadcast`), with real engines."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines import finished
from run_processes import family, running, wait_until

from prl.wire.events import BATCH, EXPORTING, OPTIMISER

pytestmark = pytest.mark.engine

BROADCAST = ("transport=broadcast", "transport.bucket_mb=1", "monitor.console.mode=plain")
ON_POLICY = ("orchestrator.batch_size=64", "orchestrator.max_async_level=0", "orchestrator.eval.every=null")


def no_weights(folder):
    """No weights are on the disk but those of checkpoints, and no messages."""
    left = {path.name.rstrip("0123456789") for path in folder.glob("weights/**/*") if path.is_file()}
    return left <= {"peers-"} and not (folder / "batches").exists()


def test_sampler_and_trainer_agree_after_every_transfer_and_files_train_the_same(train):
    """Up to the order in which the engine adds; that what is sent is what would be written is tested to the bit."""
    common = ("experiment=on_policy", "max_steps=6", "orchestrator.eval.every=null")
    sent, written = train(*common, *BROADCAST, name="sent"), train(*common, name="written")
    assert sent.status == written.status == 0, sent.stderr + written.stderr
    assert all(gap < 1e-5 for gap in sent.column("logprob_gap/mean"))
    assert sent.column("grad_norm")[0] > 0.1, "the weights did change between those comparisons"
    for key in ("loss/mean", "grad_norm", "logprob_gap/mean", "reward/all/mean"):
        assert sent.column(key)[:3] == pytest.approx(written.column(key)[:3], rel=1e-2, abs=1e-6), key
    assert set(sent.column("off_policy/max")) == {0.0} and all(s > 0 for s in sent.column("time/update_weights"))
    assert no_weights(sent.dir) and not no_weights(written.dir)


def test_several_ranks_send_and_the_run_goes_on_from_its_checkpoint(train):
    knobs = (*ON_POLICY, *BROADCAST, "trainer.num_processes=2")
    run = train(*knobs, "max_steps=3")
    assert run.status == 0, run.stderr
    again = train(*BROADCAST, f"run.resume={run.dir}", "max_steps=6", "--trust")
    assert again.status == 0, again.stderr
    assert [line["step"] for line in again.steps] == list(range(7))
    assert all(gap < 1e-5 for gap in again.column("logprob_gap/mean"))


@pytest.fixture
def alone(tmp_path):
    """`alone(*overrides)`: a run with engines of its own, its folder, and a function for its steps so far."""
    begun = []

    def run(*overrides):
        folder, said = tmp_path / "run", tmp_path / "stderr"
        command = [sys.executable, "-m", "prl.train", *BROADCAST, *overrides, f"run.dir={folder}"]
        with said.open("w") as stderr:
            process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=stderr)
        begun.append(process)

        def steps():
            assert process.poll() is None or process.returncode == 0, said.read_text()
            metrics = folder / "metrics.jsonl"
            return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

        def end():
            assert process.wait(300) == 0, said.read_text()
            return finished(folder, process.returncode, said.read_text())

        return process, folder, steps, end

    yield run
    for process in begun:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def test_two_servers_with_async_level_2_skip_versions_and_keep_the_rules(alone):
    """While an evaluation occupies the engines the trainer trains on, and they get the version that it has by then."""
    knobs = ("inference.servers=2", "orchestrator.max_async_level=2", "orchestrator.max_off_policy_steps=4")
    evaluation = ("orchestrator.eval.every=3", "orchestrator.eval.num_tasks=200")
    *_, end = alone(*knobs, *evaluation, "orchestrator.batch_size=64", "max_steps=24", "trainer.token_export=true")
    run = end()
    assert [line["step"] for line in run.steps] == list(range(25))
    loaded = [line["step"] for line in run.steps if "time/update_weights" in line]
    assert loaded[-1] == 24 and len(loaded) < 24, "some were skipped"
    assert all(staleness <= 4 for staleness in run.column("off_policy/max"))
    newest = 0
    for step in range(1, 25):
        for record in run.rollouts(step):
            start, stop = record["start_version"], record["end_version"]
            assert start in {0, *loaded} and start <= stop <= 24 and (start >= step - 1 - 4 or not record["outcome"])
            newest = max(newest, start)
    assert newest > 15
    assert no_weights(run.dir)


def killed(process):
    """The first engine of a run, after it was killed."""
    engines = {pid: line for pid, line in family(process.pid).items() if "-m prl.inference.server" in line}
    server = min(pid for pid, line in engines.items() if "reaper.py" not in line)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not running(server), 10, "the engine's end")


def sharing(process):
    """What each process of a run may do with buckets that it shares."""
    found = []
    for pid in family(process.pid):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found += re.findall(r"^\S+ (\S+) .*memfd:prl-buckets", maps, re.MULTILINE)
    return sorted(found)


def listening(process):
    """The TCP ports that the processes of a run listen on, its orchestrator's among them."""
    ports, own = {}, set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for columns in [line.split() for line in Path(table).read_text().splitlines()[1:]]:
            if columns[3] == "0A":
                ports[f"socket:[{columns[9]}]"] = int(columns[1].rsplit(":", 1)[1], 16)
    for pid in (process.pid, *family(process.pid)):
        with contextlib.suppress(OSError):
            own |= {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    return {port for name, port in ports.items() if name in own}


def test_an_engine_that_is_killed_while_weights_pass_costs_nothing(alone):
    """The kill comes right after the trainer has begun to send. The other engine gets a transfer of its own."""
    process, folder, steps, end = alone(*ON_POLICY, "inference.servers=2", "max_steps=90")
    wait_until(lambda: len(steps()) > 5, 240, "the run trains", pause_s=0.02)
    assert sharing(process) == ["r--s", "r--s", "rw-s"], "all are on one machine"
    assert len(listening(process)) == 3, "the servers, and the orchestrator for the trainer"
    events, began = folder / "events" / "trainer.jsonl", time.monotonic()
    while [json.loads(line)["what"] for line in events.read_text().splitlines()[-3:]] != [OPTIMISER, EXPORTING, BATCH]:
        assert time.monotonic() - began < 60
    killed(process)
    at = steps()[-1]["step"]
    wait_until(lambda: len(steps()) > at + 5, 60, "steps with one engine", pause_s=0.02)
    run = end()
    assert [line["step"] for line in run.steps] == list(range(91))
    assert "answers again" in run.stderr and run.column("engine/restarts")[-1] == 1
    assert all(gap < 1e-5 for gap in run.column("logprob_gap/mean")) and set(run.column("off_policy/max")) == {0}
    assert sum(run.column("rollouts/errored")) == 0


def test_the_only_engine_gets_the_weights_again_when_it_is_back(alone):
    process, _, steps, end = alone(*ON_POLICY, "max_steps=12")
    wait_until(lambda: len(steps()) > 4, 240, "the run trains", pause_s=0.02)
    killed(process)
    run = end()
    assert run.column("engine/restarts")[-1] == 1 and len(run.steps) == 13
    assert all(gap < 1e-5 for gap in run.column("logprob_gap/mean"))
