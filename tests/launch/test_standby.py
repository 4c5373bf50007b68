"""Processes that import ahead: they wait for the launcher's order, and are started, replaced or ended with the run."""

import atexit
import gc
import os
import sys
import time

import pytest

from prl import standby
from prl.config.schema import InferenceConfig, ModelConfig
from prl.launch import local
from prl.launch.launcher import EngineSpec, ProcessDied, TrainerSpec
from prl.launch.local import LocalLauncher
from prl.models import model_path

SCRIPT = """
import os, sys, time
from prl import standby
print("imported", flush=True)
standby.wait()
found = sys.argv[1:], os.environ["EARLY"], os.environ.get("LATE"), standby.VARIABLE in os.environ
print("begun with", *found, flush=True)
time.sleep(60)
"""


def command(*arguments, script=SCRIPT):
    return [sys.executable, "-c", script, *arguments]


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def said(path):
    return path.read_text() if path.exists() else ""


@pytest.fixture
def launcher():
    with LocalLauncher() as launcher:
        yield launcher


def test_a_process_on_standby_begins_with_the_log_and_the_environment_of_its_start(launcher, tmp_path):
    launcher.stand_by("a", command("x"), env={"EARLY": "1"})
    waiting = launcher.standby["a"]
    until(lambda: said(waiting.log) == "imported\n")
    assert not launcher.processes
    log = tmp_path / "logs" / "a.log"
    log.parent.mkdir()
    log.write_text("of a run before\n")
    process = launcher.start("a", command("x"), env={"EARLY": "1", "LATE": "2"}, log=log)
    assert process is waiting
    assert launcher.processes == [process]
    assert not launcher.standby
    until(lambda: "begun" in said(log))
    assert log.read_text() == "of a run before\nimported\nbegun with ['x'] 1 2 False\n"
    assert process.last_lines() == ["imported", "begun with ['x'] 1 2 False"], "its own output alone"
    until(lambda: not process.order.exists())


def test_an_order_that_comes_first_waits_for_the_imports(launcher, tmp_path):
    late = SCRIPT.replace('print("imported", flush=True)', "time.sleep(0.5)")
    launcher.stand_by("a", command(script=late), env={"EARLY": "1"})
    launcher.start("a", command(script=late), env={"EARLY": "1"}, log=tmp_path / "a.log")
    until(lambda: "begun with [] 1 None False" in said(tmp_path / "a.log"))


def test_a_process_on_standby_for_another_command_is_ended(launcher, tmp_path):
    launcher.stand_by("a", command("x"), env={"EARLY": "1"})
    waiting = launcher.standby["a"]
    process = launcher.start("a", command("y"), env={"EARLY": "1"}, log=tmp_path / "a.log")
    assert process is not waiting
    assert waiting.status is not None
    until(lambda: "begun with ['y']" in said(tmp_path / "a.log"))


def test_one_that_has_died_on_standby_is_started_again(launcher, tmp_path):
    marked = f"import os\nif {standby.VARIABLE!r} in os.environ: raise SystemExit('no room')\n" + SCRIPT
    launcher.stand_by("a", command(script=marked), env={"EARLY": "1"})
    until(lambda: launcher.standby["a"].status is not None)
    launcher.ensure_alive()  # it is no process of the run yet
    launcher.start("a", command(script=marked), env={"EARLY": "1"}, log=tmp_path / "a.log")
    until(lambda: "begun" in said(tmp_path / "a.log"))


def test_one_that_dies_between_its_order_and_its_begin_says_why(launcher, tmp_path):
    dying = f"""
import os, sys, time
while not os.path.exists(os.environ[{standby.VARIABLE!r}]): time.sleep(0.01)
sys.exit("no room for torch")
"""
    launcher.stand_by("a", command(script=dying), env={})
    launcher.start("a", command(script=dying), env={}, log=tmp_path / "a.log")
    until(lambda: launcher.processes[0].status is not None)
    with pytest.raises(ProcessDied, match="no room for torch"):
        launcher.ensure_alive()
    assert (tmp_path / "a.log").read_text() == "no room for torch\n", "the log is complete, and once"


def test_the_order_is_for_the_user_alone(tmp_path):
    order = tmp_path / "order"
    standby.give_order(order, env={"TOKEN": "t"}, log=tmp_path / "log", said=tmp_path / "said")
    assert order.stat().st_mode & 0o777 == 0o600


def test_engine_and_trainer_are_started_by_the_command_that_they_import_ahead_with(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "cores", lambda: 3)
    model = ModelConfig(path=str(model_path("tiny")), dtype="float32")
    engine = EngineSpec(
        "inference", "policy", model, InferenceConfig(), "cpu", 0, "secret", tmp_path / "logs" / "i.log"
    )
    ranks = TrainerSpec(tmp_path, model, {"a": 1}, num_processes=2)
    with LocalLauncher() as launcher:
        launcher.import_ahead([engine], ranks)
        waiting = dict(launcher.standby)
        assert list(waiting) == ["inference", "trainer rank 0", "trainer rank 1"]
        scratch = launcher.scratch
        url = launcher.start_engine(engine)
        assert f"--port {url.rpartition(':')[2]}" in " ".join(waiting["inference"].command)
        launcher.start_trainer(ranks)
        assert launcher.processes == list(waiting.values())
    for process in waiting.values():
        assert process.returncode is not None
    assert not scratch.exists()


@pytest.mark.parametrize(("cores", "engines"), [(2, 1), (2, 0), (1, 1), (3, 1)])
def test_the_trainer_leaves_two_cores_to_engine_and_launcher(tmp_path, monkeypatch, cores, engines):
    monkeypatch.setattr(local, "cores", lambda: cores)
    model = ModelConfig(path=str(model_path("tiny")), dtype="float32")
    engine = EngineSpec("inference", "policy", model, InferenceConfig(), "cpu", 0, "secret", tmp_path / "i.log")
    trainer = TrainerSpec(tmp_path, model, {"a": 1}, num_processes=1)
    with LocalLauncher() as launcher:
        launcher.import_ahead([engine] * engines, trainer)
        assert list(launcher.standby) == ["inference"] * engines + ["trainer"] * (cores > 2 or not engines)
        launcher.start_trainer(trainer)
        assert [process.name for process in launcher.processes] == ["trainer"]


def test_what_nobody_has_started_ends_with_the_launcher(launcher):
    launcher.stand_by("a", command(), env={"EARLY": "1"})
    process = launcher.standby["a"]
    launcher.stop()
    assert process.returncode is not None
    assert not os.path.exists(f"/proc/{process.pid}")


def test_a_port_in_use_is_left_for_the_start_to_say(tmp_path):
    model = ModelConfig(path=str(model_path("tiny")), dtype="float32")
    config = InferenceConfig(host="203.0.113.7")  # of nobody's machine
    with LocalLauncher() as launcher:
        launcher.import_ahead([EngineSpec("inference", "policy", model, config, "cpu", 0, "t", tmp_path / "log")], None)
        assert not launcher.standby


def test_a_process_without_the_variable_does_not_wait(monkeypatch):
    monkeypatch.delenv(standby.VARIABLE, raising=False)
    standby.wait()


def test_imports_are_not_looked_through_for_cycles(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    monkeypatch.setattr(atexit, "register", lambda function: None)
    with standby.importing():
        assert not gc.isenabled() and not frozen
    assert gc.isenabled() and frozen == [False]
