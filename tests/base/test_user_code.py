"""Code that a config names: whatever it does before a run starts is a refusal in one line."""

import os
import signal
import sys

import pytest
from engines import started
from patience import patient
from run_processes import wait_until

from prl.algorithms.base import Algorithm
from prl.base.errors import ConfigError, PrlError
from prl.base.user_code import called, contained
from prl.config.build import build

CLASS = """
import asyncio, os, sys
from prl.algorithms.grpo import GRPOAlgorithm
class Stop(BaseException): pass
{at_import}
class Mine(GRPOAlgorithm):
    def __init__(self):
        {made}
        super().__init__()
    def check(self, where):
        {checked}
"""
TASKSET = """
import pathlib, time
import verifiers.v1 as vf
class Loads(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        pathlib.Path("loading").touch()
        time.sleep(60)
__all__ = ["Loads"]
"""
# Of a server elsewhere: no engine imports ahead, for seconds, what this run does not come to.
URLS = "engine.urls=[http://127.0.0.1:1]"
OF_TASKSET = ("env=[]", "+envs.mine.taskset=mine_tasks", URLS)


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """`refusal(at_import=…, made=…, checked=…)`: what is said of an algorithm with these statements."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be taken for that of a source as long and as old

    def said(**bodies):
        source = CLASS.format(**{"at_import": "", "made": "pass", "checked": "pass"} | bodies)
        (tmp_path / "mine_algo.py").write_text(source)
        with pytest.raises(ConfigError) as caught:
            build({"_target_": "mine_algo.Mine"}, Algorithm, "algo")
        return str(caught.value)

    yield said
    sys.modules.pop("mine_algo", None)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("raise SystemExit(4)", "SystemExit: 4"),  # `sys.exit` may be wandb's by now, which is in another file
        ("raise asyncio.CancelledError", "CancelledError"),
        ("raise Stop('x')", "Stop: x"),
    ],
)
def test_exception_is_a_refusal_with_key_and_line(refusal, tmp_path, body, name):
    path = tmp_path / "mine_algo.py"
    at_import = f"algo._target_='mine_algo.Mine': importing it failed: {name} ({path}, line 5)"
    assert refusal(at_import=body) == at_import
    assert refusal(checked=body) == f"algo: Mine.check failed: {name} ({path}, line 11)"
    sys.modules.pop("mine_algo")
    assert refusal(made=body) == f"algo: making Mine failed: {name} ({path}, line 8)"


def test_ctrl_c_is_no_failure_of_the_code():
    with pytest.raises(KeyboardInterrupt), contained("algo", "making it"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ZeroDivisionError("odd")])
def test_what_a_component_raises_in_a_run_names_it(error):
    with (
        pytest.raises(PrlError, match=rf"^filters\.x: object\.matches failed: {type(error).__name__}"),
        called("filters.x", object(), "matches"),
    ):
        raise error
    with pytest.raises(ConfigError, match="^as it is$"), called("filters.x", object()):
        raise ConfigError("as it is")


@pytest.mark.slow
def test_a_signal_while_loading_tasks_leaves_nothing(forks, tmp_path):
    (tmp_path / "mine_tasks.py").write_text(TASKSET)
    given = {
        "arguments": [*OF_TASKSET, "run.dir=a/b/c"],
        "env": {**os.environ, "OMP_NUM_THREADS": "1", "PRL_TOKEN": "a"},
        "folder": str(tmp_path),
        "stderr": str(tmp_path / "said"),
    }
    process = started(forks, given)
    try:
        wait_until((tmp_path / "loading").exists, 90, "the tasks are loaded")
        os.kill(process.pid, signal.SIGTERM)
        process.join(patient(20))
    finally:
        process.kill()
    said = (tmp_path / "said").read_text().splitlines()
    assert (process.exitcode, said[1:]) == (128 + signal.SIGTERM, ["stopped"])
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"loading", "mine_tasks.py", "said"}
