"""Code that holds the event loop of a run up: named on the terminal, and interrupted by a second signal."""

import signal
import subprocess
import sys
import time

import pytest

RUN = """
import asyncio, re, sys, threading, time
from prl import signals
signals.STILL_S = float(sys.argv[2])
signals.BEAT_S = 0.3

def spins():
    while True:
        pass

def sleeps():
    time.sleep(600)

def locks():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def backtracks():
    re.match("(a+)+$", "a" * 60 + "b")

async def work():
    await asyncio.sleep(0.1)
    print("holds", flush=True)
    try:
        globals()[sys.argv[1]]()
    except KeyboardInterrupt:  # as one that an env's code raises: its rollout has failed
        print("interrupted", flush=True)
    await asyncio.sleep(600)


async def notebook():
    signals.run_to_end(work())

try:
    asyncio.run(notebook()) if sys.argv[3:] else signals.run_to_end(work())
except asyncio.CancelledError:
    sys.exit(130)
"""
HOLDS = ["spins", "sleeps", "locks", "backtracks"]


def start(how, still_s, *more):
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, how, str(still_s), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "holds\n", process.stderr.read()
    return process


@pytest.mark.parametrize("inside_a_loop", [False, True])
@pytest.mark.parametrize("how", HOLDS)
def test_code_that_holds_the_loop_up_is_named_while_it_does(how, inside_a_loop):
    process = start(how, 0.5, *["notebook"] * inside_a_loop)
    try:
        while f" in {how}" not in (line := process.stderr.readline()):
            assert line, "it ended without a word"
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", HOLDS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_interrupts_it_and_stops_the_run(how, number):
    process = start(how, 60.0)
    process.send_signal(number)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "interrupted\n", err
