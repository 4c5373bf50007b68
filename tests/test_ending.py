"""The end of a command in whose process something is left."""

import re
import subprocess
import sys
import time

import pytest
from run_processes import running, wait_until

COMMAND = """
import atexit, multiprocessing, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import prl.ending
from prl.ending import ending
prl.ending.MOMENT_S = 0.5
def forever():
    while True:
        time.sleep(0.05)
with ending():
    atexit.register(print, "at exit")
    {leave}
    {end}
"""


@pytest.fixture
def command(tmp_path):
    """`command(leave, end)`: a command with these statements; its status, what it printed and said, and its seconds."""

    def run(leave, end="pass"):
        (tmp_path / "mine.py").write_text(COMMAND.format(leave=leave, end=end))
        began = time.monotonic()
        done = subprocess.run([sys.executable, tmp_path / "mine.py"], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr, time.monotonic() - began

    return run


def named(said):
    """What is named as ended, without the folder of the script."""
    [names] = re.findall(r"^still running at the end, and ended: (.+)$", said, re.M)
    return re.sub(r"/\S+/", "", re.sub(r"process \d+", "process N", names))


LEFT = [
    ("threading.Thread(target=forever, name='mine').start()", "thread mine at mine.py, line 9"),
    ("ThreadPoolExecutor(1, 'pool').submit(forever)", "thread pool_0 at mine.py, line 9"),
    ("subprocess.Popen(['sleep', '60'])", "process N (sleep)"),
    ("subprocess.Popen(['sh', '-c', 'sleep 60; true'])", "process N (sh), process N (sleep)"),
    ("multiprocessing.Process(target=forever).start()", "process N (python)"),
]


@pytest.mark.parametrize(("leave", "names"), LEFT, ids=[name for _, name in LEFT])
def test_what_is_left_is_named_and_ended(command, leave, names):
    status, printed, said, seconds = command(leave)
    found = re.sub(r"\(python[\d.]*\)", "(python)", named(said))
    assert (status, printed, found) == (0, "at exit\n", names) and seconds < 30


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(2)", 2), ("raise ValueError('no')", 1), ("raise KeyboardInterrupt", 130)]
)
def test_the_status_stays(command, end, status):
    thread = "threading.Thread(target=forever, name='mine').start()"
    got, printed, said, _ = command(thread, end)
    assert (got, printed) == (status, "at exit\n") and named(said).startswith("thread mine")
    assert ("Traceback" in said) is (status != 2)


def test_a_process_that_was_left_is_gone(command):
    _, printed, _, _ = command("print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)")
    wait_until(lambda: not running(int(printed.split()[0])), 5, "the process is gone")


def test_what_ends_by_itself_is_not_named(command):
    leave = (
        "ThreadPoolExecutor(1).submit(time.sleep, 0.1); multiprocessing.Process(target=time.sleep, args=[0.2]).start()"
    )
    assert command(leave)[:3] == (0, "at exit\n", "")


def test_what_is_prls_own_is_left_to_itself(command):
    own = "from prl.reaper import fork; fork(lambda: time.sleep(2)); from prl.scratch import Scratch; Scratch()"
    assert command(own)[:3] == (0, "at exit\n", "")


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_after_the_end_of_the_command_changes_nothing(command, number):
    end = f"atexit.register(lambda: os.kill(os.getpid(), signal.{number})); raise SystemExit(3)"
    status, printed, said, _ = command(
        "import os, signal; signal.signal(signal.SIGTERM, signal.default_int_handler)", end
    )
    assert (status, printed, said) == (3, "at exit\n", "")


def test_what_open_files_hold_in_memory_is_written(command, tmp_path):
    """Python does so at its own end; the process goes without it where nothing is left."""
    leave = (
        "files = [open(f'{sys.argv[0]}.{mode}', mode) for mode in ('w', 'wb')]; files[0].write('text'); "
        "files[1].write(b'bytes'); import gc; gc.freeze(); sys.stdout.write('printed, '); "
        "import ctypes; ctypes.CDLL(None).puts(b'by C')"
    )
    status, printed, said, _ = command(leave, "mine = files")
    assert (status, said) == (0, "") and sorted(printed.splitlines()) == ["at exit", "printed, by C"]
    assert [(tmp_path / f"mine.py.{mode}").read_text() for mode in ("w", "wb")] == ["text", "bytes"]


def test_modules_are_not_taken_apart(command):
    """It takes a second where verifiers has been imported. An object that is left tells whether it was."""
    leave = "class Left:\n        def __del__(self): print('taken apart')\n    left = Left()"
    assert command(leave)[1] == "at exit\n"
    assert command(leave, "import cProfile; cProfile.Profile().enable()")[1] == "at exit\ntaken apart\n"
    assert command(leave, "raise SystemExit(3)")[:2] == (3, "at exit\n")
    status, printed, said, _ = command(leave, "raise SystemExit('why')")
    assert (status, printed, said) == (1, "at exit\ntaken apart\n", "why\n")
