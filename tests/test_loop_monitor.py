"""Hooks that spin, sleep or block in the event loop of a run: said, interrupted by signals and at their deadline."""

import re
import signal
import subprocess
import sys
import time

import pytest

HOOKS = """
import asyncio, ctypes, itertools, pathlib, re, signal, sys, threading, time
from prl import loop_monitor
from prl.errors import PrlError
from prl.loop_monitor import watching
from prl.monitors.base import Monitor, Monitors
from prl.signals import run_to_end
from prl.log import hold_log

QUIET, LIMIT = map(float, sys.argv[2:4])
loop_monitor.STILL_S, loop_monitor.BEAT_S, loop_monitor.STOP_S, loop_monitor.GRACE_S = 0.2, 0.05, 0.3, 0.5
loop_monitor.QUIET_S, loop_monitor.DEAF_S = QUIET, 1.5

class Mine(Monitor):
    def step(self, line):
        print("holds", flush=True)
        getattr(self, sys.argv[1])()
    def spin(self):
        while True:
            pass
    def sleep(self):
        time.sleep(100)
    def lock(self):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    def backtrack(self):
        re.match("(a+)+$", "a" * 60 + "b")
    def swallow(self):
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                pass
    def deaf(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the other threads hear them
        ctypes.CDLL(None).sleep(100)

    def keep(self):
        sum(itertools.count())

def leave(status, error):
    print(f"{status}: {error}", flush=True)

async def work():
    with watching("the run") as loop:
        monitor = Mine()
        loop.hooks[id(monitor)] = ("monitor.mine", LIMIT)
        loop.leave = leave
    monitors = Monitors({"mine": monitor})
    monitors.start(pathlib.Path("."), max_steps=1, run_config={})
    try:
        await asyncio.sleep(0)
        await asyncio.ensure_future(step(monitors))
    except asyncio.CancelledError:
        await asyncio.sleep(0.01)
        print("in order", flush=True)
        raise
    finally:
        monitors.close()

async def step(monitors):
    monitors.step({"step": 1})

hold_log()
try:
    run_to_end(work())
except asyncio.CancelledError:
    sys.exit(130)
except PrlError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
"""
HEARS = ["spin", "sleep", "lock", "backtrack"]
"""What Python code can be interrupted in."""
DEAF = ["swallow", "deaf"]


def start(how: str, quiet_s: float, limit_s: float) -> subprocess.Popen:
    argv = [sys.executable, "-c", HOOKS, how, str(quiet_s), str(limit_s)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "holds\n", process.stderr.read()
    return process


@pytest.mark.parametrize("how", HEARS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_in_order_while_a_hook_holds_it(how, number):
    process = start(how, 60, 60)
    time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "in order\n", err
    assert f"interrupting Mine.{how} (<string>, line " in err


@pytest.mark.parametrize("how", HEARS)
def test_a_hook_that_holds_the_run_is_named_and_ends_it_at_its_deadline(how):
    process = start(how, 0.4, 1.5)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == ""
    assert re.search(
        rf"WARNING: no progress for \d s: monitor.mine: the run waits for Mine.{how} \(<string>, line \d+\)", err
    )
    (last,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert last.startswith(
        "error: monitor.mine: Mine.step failed: StoodStill: it did not return to the event loop for 1.5 s, at "
        f"Mine.{how} (<string>, line "
    )


@pytest.mark.parametrize("how", DEAF)
@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_a_hook_that_cannot_be_interrupted_ends_with_the_process(how, number):
    process = start(how, 60, 1.0 if number is None else 60)
    if number is not None:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    status, code = ("failed", 1) if number is None else ("stopped", 130)
    assert process.returncode == code, err
    assert out.startswith(f"{status}: monitor.mine: Mine.{how} (")
    assert "did not stop when it was interrupted" in err.splitlines()[-1]


@pytest.mark.parametrize(
    "taken",
    [
        "loop.add_signal_handler(SIGUSR1, f)",
        "loop.add_signal_handler(SIGTERM, f)",
        "loop.add_signal_handler(SIGUSR1, f); loop.remove_signal_handler(SIGUSR1)",
        "signal.signal(SIGTERM, f)",
    ],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_hook_that_handles_signals_itself_keeps_none_from_the_run(taken, number):
    taking = f"f, loop = lambda *_: None, asyncio.get_running_loop(); from signal import SIGTERM, SIGUSR1; {taken}"
    code = HOOKS.replace("time.sleep(100)", taking.replace("; ", "\n        "))
    code = code.replace('monitors.step({"step": 1})', 'monitors.step({"step": 1})\n    await asyncio.sleep(100)')
    process = subprocess.Popen([sys.executable, "-c", code, "sleep", "60", "60"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "holds\n"
    time.sleep(1)
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == "in order\n" and process.returncode == 130


def test_a_hook_that_is_quick_enough_is_let_be_at_a_signal():
    code = HOOKS.replace("time.sleep(100)", "time.sleep(0.25)")
    process = subprocess.Popen([sys.executable, "-c", code, "sleep", "60", "60"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "holds\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "in order\n" and process.returncode in (0, 130)


def test_a_hook_in_c_that_hears_nothing_and_keeps_the_interpreter_is_ended_by_the_kernel_and_named():
    process = start("keep", 60, 60)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGPROF and re.search(r'File "<string>", line \d+ in keep\n', err)


LATE = """
from prl import signals
class Late(signals.ThreadPoolExecutor):
    def submit(self, *work):
        begun = super().submit(*work)
        time.sleep(1)
        return begun
signals.ThreadPoolExecutor = Late
"""


@pytest.mark.parametrize("before", ["", LATE], ids=["waits", "has only begun the work"])
def test_in_a_notebook_a_sigint_interrupts_a_hook_that_spins(before):
    inside = f"{before}\nasync def cell():\n    run_to_end(work())\nhold_log()"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOOKS.replace("hold_log()", inside).replace(
                "    run_to_end(work())\nexcept", "    asyncio.run(cell())\nexcept"
            ),
            "spin",
            "60",
            "60",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "holds\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "in order\n" and "interrupting Mine.spin (" in err
