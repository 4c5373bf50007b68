"""However a part of a run ends, no process of it stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_processes import family, running, wait_until

from prl.launch import children
from prl.launch.launcher import ProcessDied
from prl.launch.local import LocalLauncher

LAUNCHER = """
import os, sys, time
from pathlib import Path
from prl.launch.local import LocalLauncher
folder = Path(sys.argv[1])
with LocalLauncher() as processes:
    for name in ("one", "two"):
        processes.start(name, ["sh", str(folder / f"{name}.sh")], env={}, log=folder / f"{name}.log")
    (folder / "scratch").write_text(str(processes.scratch))
    (folder / "launcher.pid").write_text(str(os.getpid()))
    time.sleep(120)
"""
TREE = ("one", "one_grandchild", "two", "two_grandchild")


@pytest.fixture
def scripts(tmp_path, sleeper):
    """`one.sh` and `two.sh`: a child with a grandchild each. `two` and its grandchild ignore SIGTERM."""
    for name, setup in (("one", ""), ("two", "trap '' TERM;")):
        grandchild = tmp_path / f"{name}_grandchild.sh"
        grandchild.write_text(sleeper(f"{name}_grandchild", setup))
        (tmp_path / f"{name}.sh").write_text(f"sh {grandchild} &\n{sleeper(name, setup)}")
    return tmp_path


@pytest.fixture
def launcher(scripts):
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(scripts)], stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_launcher(launcher, scripts, pids, number):
    """SIGINT it handles in order; the others end it on the spot."""
    pids.wait(*TREE, "launcher")
    left, scratch = family(launcher.pid), Path((scripts / "scratch").read_text())
    assert len(left) >= 6 and scratch.is_dir(), "a supervisor, a child and a grandchild each"
    launcher.send_signal(number)
    pids.wait_gone(*left, timeout_s=children.GRACE_S + 5)
    wait_until(lambda: not scratch.exists(), 5, "the folder is removed")


@pytest.mark.parametrize("victim", ["child", "supervisor"])
def test_a_kill_inside_is_noticed_and_leaves_nothing(scripts, pids, victim, monkeypatch):
    monkeypatch.setattr(children, "GRACE_S", 0.5)
    with pytest.raises(ProcessDied, match="process 'two' ended with status 137"), LocalLauncher() as processes:
        process = processes.start("two", ["sh", str(scripts / "two.sh")], env={}, log=scripts / "two.log")
        child, grandchild = pids.wait("two", "two_grandchild")
        os.kill(child if victim == "child" else process.pid, signal.SIGKILL)
        pids.wait_gone(child, timeout_s=2)
        wait_until(lambda: process.status is not None, 15, "the end of the supervisor")
        processes.ensure_alive()
    pids.wait_gone(grandchild, timeout_s=3)


def test_the_path_of_the_folder_for_sockets_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 60)))
    with LocalLauncher() as processes:
        socket = processes.scratch / "0f0085c3-592e-4785-b468-663333be919c"  # as vLLM names them
        assert processes.scratch.stat().st_mode & 0o777 == 0o700 and len(str(socket)) < 108


COMMAND = """
import atexit, subprocess, sys, time
from multiprocessing import shared_memory
from prl.launch.children import leave_none
leave_none()
atexit.register(print, "at exit")
{leave}
{end}
"""
LEFT = [
    ("subprocess.Popen(['sh', '-c', 'sleep 60 & sleep 60'])", "raise ValueError", 1),
    ("subprocess.run(['sh', '-c', 'setsid sleep 60 &'])", "pass", 0),
]


@pytest.mark.parametrize(("leave", "end", "status"), LEFT)
def test_a_command_leaves_no_process_of_the_users_code(leave, end, status):
    show = "print(*(child.pid for child in __import__('psutil').Process().children(recursive=True)), flush=True)"
    code = COMMAND.format(leave=f"{leave}; time.sleep(0.3); {show}", end=end)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=30)
    started, at_exit = done.stdout.splitlines()
    assert (done.returncode, at_exit) == (status, "at exit") and started
    assert not any(map(running, map(int, started.split())))


def test_command_does_not_wait_for_shared_memory_tracker():
    code = COMMAND.format(leave="memory = shared_memory.SharedMemory(create=True, size=64); print(memory.name)", end="")
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and time.monotonic() - began < children.GRACE_S
    assert not Path("/dev/shm", done.stdout.split()[0]).exists()
