"""Code of an env that runs before anything else: it has a deadline, can be interrupted, and its ends are refusals."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from patience import patient

from prl.config.schema import EnvConfig
from prl.episodes.environment import Environment
from prl.errors import ConfigError
from prl.user_code import Interrupted, in_time

SOURCE = """
class Loads(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        {body}
        yield vf.Task(vf.TaskData(prompt="?"))
__all__ = ["Loads"]
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import sys; sys.exit(3)", "envs.mine.args: loading the tasks of Loads failed: SystemExit: 3 ("),
        ("raise KeyboardInterrupt", "envs.mine.args: loading the tasks of Loads failed: KeyboardInterrupt ("),
        ("f = lambda n: f(n); f(0)", "envs.mine.args: loading the tasks of Loads failed: RecursionError: "),
    ],
)
def test_what_ends_a_load_is_a_refusal_with_env_and_class(module, refused, body, says):
    assert says in refused(module(SOURCE.format(body=body)))


def test_what_ends_an_import_is_a_refusal(module, refused):
    assert "importing it failed: SystemExit: 4 (" in refused(module("import sys\nsys.exit(4)\n"))


@pytest.mark.parametrize("body", ["while True: pass", "import time; time.sleep(60)"])
def test_a_load_without_end_is_refused_at_its_deadline_with_the_line(module, body):
    config = EnvConfig(taskset=module(SOURCE.format(body=body)), load_timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        Environment("mine", config, eval_tasks=0)
    assert time.monotonic() - started < patient(3.0)
    said = str(caught.value)
    assert said.startswith(
        "envs.mine.load_timeout_s: loading 'package_of_tests.tasks' had not ended after 0.3 s; it was"
    )
    assert said.endswith("tasks.py, line 5")
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_ctrl_c_during_a_load_is_the_users_and_an_interrupt_of_its_own_is_not():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted), in_time(5.0, "x", "y", watched=False):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)
    assert signal.getsignal(signal.SIGINT) is before
    assert not issubclass(KeyboardInterrupt, Interrupted)


def test_a_deadline_that_is_over_at_once_is_a_refusal():
    with pytest.raises(ConfigError, match="^x: y had not ended after 1e-06 s"), in_time(1e-6, "x", "y", watched=False):
        time.sleep(60)


def test_a_deadline_of_somebody_else_goes_on():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with in_time(5.0, "x", "y", watched=False):
            time.sleep(0.05)
        assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] < 0.3
        time.sleep(0.4)
        assert rung == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


PROGRAM = """
    import os, sys, time
    from prl import user_code
    user_code.GRACE_S = 0.2
    with user_code.in_time(float(sys.argv[1]), "envs.mine.load_timeout_s", "loading 'mine'"):
        print("loading", flush=True)
        {body}
"""
STUBBORN = """
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
"""


def loads(body, limit_s):
    program = textwrap.dedent(PROGRAM).replace("    {body}", textwrap.indent(textwrap.dedent(body).strip(), "    "))
    return subprocess.Popen(
        [sys.executable, "-c", program, str(limit_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("body", "limit_s", "number", "says"),
    [
        (STUBBORN, 0.3, None, "loading 'mine' had not ended after 0.3 s, and cannot be interrupted"),
        (STUBBORN, 60.0, signal.SIGINT, "loading 'mine' did not stop when it was interrupted"),
        ("os._exit(0)", 60.0, None, "loading 'mine' ended the process"),
    ],
)
def test_a_load_that_cannot_be_interrupted_ends_with_the_process_and_a_line(body, limit_s, number, says):
    process = loads(body, limit_s)
    assert process.stdout.readline() == "loading\n"
    if number is not None:
        time.sleep(0.2)
        for child in (process.pid, *children(process.pid)):  # as a terminal does, to the whole group
            os.kill(child, number)
    _, err = process.communicate(timeout=10)
    assert err == f"error: envs.mine.load_timeout_s: {says}\n"


def children(pid):
    return [int(each) for each in open(f"/proc/{pid}/task/{pid}/children").read().split()]
