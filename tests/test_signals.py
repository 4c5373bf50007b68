"""Signals that stop a command: its work ends in order, and its status and `result.json` say so."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from patience import patient

from prl.base.errors import PrlError
from prl.launch.command import errors_as_exit_codes
from prl.launch.signals import Stopped, run_to_end
from prl.runs.result import read_result

COMMAND = """
import asyncio, pathlib, sys, time
from prl.runs.result import RunResult
from prl.runs.run_dir import recorded
from prl.launch.signals import Stopped, run_to_end
async def work():
    try:
        print("ready", flush=True)
        await asyncio.sleep(float(sys.argv[2]))
    finally:
        print("shuts down", flush=True)
        await asyncio.sleep({shutdown_s})
        print("in order", flush=True)
try:
    with recorded(pathlib.Path(sys.argv[1]), RunResult(), 0.0):
        run_to_end(work())
except Stopped as end:
    sys.exit(128 + end.number)
"""


def code_of(shutdown_s=0.1):
    return COMMAND.format(shutdown_s=shutdown_s)


def started(run_dir, shutdown_s):
    """The command, once its work has begun."""
    command = [sys.executable, "-c", code_of(shutdown_s), str(run_dir), "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("signals", "shutdown_s", "printed"),
    [
        ([signal.SIGINT], 0.1, "in order\n"),
        ([signal.SIGINT, signal.SIGINT], 60, ""),
        ([signal.SIGTERM, signal.SIGTERM], 1, "in order\n"),
    ],
)
def test_first_signal_stops_in_order_second_at_once(tmp_path, signals, shutdown_s, printed):
    with started(tmp_path, shutdown_s) as process:
        process.send_signal(signals[0])
        assert process.stdout.readline() == "shuts down\n"
        for number in signals[1:]:
            process.send_signal(number)
        assert process.stdout.read() == printed
    assert process.returncode == 128 + signals[0] and read_result(tmp_path).status == "stopped"


def test_exit_status_names_the_signal(capsys):
    with pytest.raises(SystemExit) as caught, errors_as_exit_codes():
        raise Stopped(signal.SIGTERM)
    assert caught.value.code == 143 and capsys.readouterr().err == "stopped\n"


UNHEARD = """
import asyncio, os, signal, sys, weakref
from prl.launch.signals import Stopped, run_to_end, stop
number = int(sys.argv[1])
signal.signal(number, stop)

class Thing:
    pass

thing = Thing()
callback = weakref.ref(thing, lambda _: os.kill(os.getpid(), number))
del thing  # Python drops what the handler raises here

async def work():
    print("trains", flush=True)

try:
    run_to_end(work())
except Stopped as end:
    sys.exit(128 + end.number)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_python_drops_stops_the_run_before_it_begins(number):
    done = subprocess.run([sys.executable, "-c", UNHEARD, str(int(number))], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert "Exception ignored" in done.stderr and "never awaited" not in done.stderr


TAKEN = """
import asyncio, signal, sys
from prl.launch import signals
signals.BEAT_S = 0.1
number, how = int(sys.argv[1]), sys.argv[2]

async def work():
    if how == "loop":
        asyncio.get_running_loop().add_signal_handler(number, print, "theirs")
    else:
        signal.signal(number, signal.SIG_IGN if how == "ignored" else lambda *_: print("theirs"))
    await asyncio.sleep(0.4)  # some beats
    print("ready", flush=True)
    await asyncio.sleep(60)

try:
    signals.run_to_end(work())
except signals.Stopped as end:
    sys.exit(128 + end.number)
"""


@pytest.mark.parametrize(
    ("number", "how"),
    [
        *((signal.SIGINT, how) for how in ("loop", "ignored", "handled")),  # asyncio has a handler of its own for it
        (signal.SIGTERM, "loop"),
        (signal.SIGHUP, "handled"),
    ],
)
def test_signals_that_code_of_the_run_has_taken_stop_it_all_the_same(number, how):
    script = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + TAKEN  # the tests may run under nohup
    command = [sys.executable, "-c", script, str(int(number)), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        process.wait(patient(10))
    assert process.returncode == 128 + number


def test_code_of_the_run_cannot_stop_its_loop():
    ended = []

    async def work():
        with pytest.raises(RuntimeError, match="goes on"):
            asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        ended.append(True)

    run_to_end(work())
    assert ended


HOLDS = """
import asyncio, re, sys
from prl.launch import signals
signals.STILL_S, signals.BEAT_S = float(sys.argv[2]), 0.2

def spins():
    while True:
        pass

def backtracks():
    re.match("(a+)+$", "a" * 60 + "b")

async def work():
    print("holds", flush=True)
    try:
        globals()[sys.argv[1]]()
    except KeyboardInterrupt:  # as one that an env's code raises: its rollout has failed
        print("interrupted", flush=True)
    await asyncio.sleep(600)

signals.run_to_end(work())
"""


def holding(how, still_s):
    """A process whose event loop code holds up."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, how, str(still_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "holds\n", process.stderr.read()
    return process


@pytest.mark.parametrize("how", ["spins", "backtracks"])
def test_code_that_blocks_the_loop_is_named(how):
    process = holding(how, 0.5)
    try:
        while f" in {how}" not in (line := process.stderr.readline()):
            assert line, "it ended without a word"
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_second_ctrl_c_interrupts_code_that_blocks_the_loop():
    process = holding("spins", 60.0)
    process.send_signal(signal.SIGINT)
    time.sleep(patient(1.0))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert printed == "interrupted\n" and "Stopped" in errors


def in_terminal(*command):
    """Run a command in a terminal of its own, which closes once it has printed `ready`; return its status."""
    child, terminal = pty.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execvp(command[0], command)
    printed = b""
    while b"ready\r\n" not in printed:  # all of it: the write of a part could fail
        printed += os.read(terminal, 4096)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_terminal_that_closes_stops_a_run_in_order(tmp_path):
    assert in_terminal(sys.executable, "-c", code_of(), str(tmp_path), "60") == 129
    assert read_result(tmp_path).status == "stopped"


def test_a_run_under_nohup_outlives_its_terminal(tmp_path):
    without_hangup = 'trap "" HUP; echo ready; exec "$@" >/dev/null 2>&1'
    assert in_terminal("sh", "-c", without_hangup, "-", sys.executable, "-c", code_of(), str(tmp_path), "2") == 0
    assert read_result(tmp_path).status == "completed"


def test_work_leaves_signal_handlers_as_they_were():
    async def work():
        await asyncio.sleep(0)
        raise PrlError("done")

    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(PrlError, match="done"):
            run_to_end(work())
        assert {signal.getsignal(number) for number in before} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


IN_A_NOTEBOOK = """
import asyncio, signal, sys
from prl.launch.signals import run_to_end
async def work():
    try:
        print("ready", flush=True)
        await asyncio.sleep(float(sys.argv[1]))
    finally:
        print("in order", flush=True)
async def cell():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a notebook's kernel has it
    try:
        run_to_end(work())
        print("done", flush=True)
    except KeyboardInterrupt:
        print("stopped", flush=True)
asyncio.run(cell())
"""


@pytest.mark.parametrize(("seconds", "last"), [("0.1", "done"), ("60", "stopped")])
def test_where_an_event_loop_runs_already_the_work_runs_and_an_interrupt_stops_it(seconds, last):
    process = subprocess.Popen([sys.executable, "-c", IN_A_NOTEBOOK, seconds], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    if seconds == "60":
        process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=patient(20))[0].splitlines() == ["in order", last]
