"""However a part of a run is killed, no process of it stays behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from prl import reaper
from prl.launch.local import LocalLauncher, ProcessDied

LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from prl.launch.local import LocalLauncher
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has put the tests into the background
folder = Path(sys.argv[1])
with LocalLauncher() as processes:
    for name in ("one", "two"):
        processes.start(name, ["sh", str(folder / f"{name}.sh")], env={}, log=folder / f"{name}.log")
    (folder / "launcher.pid").write_text(str(os.getpid()))
    time.sleep(120)
"""
TREE = ("one", "one_grandchild", "two", "two_grandchild")


def sh_script(path, text):
    path.write_text(text + "\n")


@pytest.fixture
def scripts(tmp_path, sleeper):
    """`one.sh` and `two.sh`: a child with a grandchild each. `two` and its grandchild ignore SIGTERM."""
    for name, setup in (("one", ""), ("two", "trap '' TERM;")):
        sh_script(tmp_path / f"{name}_grandchild.sh", sleeper(f"{name}_grandchild", setup))
        sh_script(tmp_path / f"{name}.sh", f"sh {tmp_path}/{name}_grandchild.sh &\n" + sleeper(name, setup))
    return tmp_path


@pytest.fixture
def launcher(scripts):
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(scripts)], stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def with_reapers(ids):
    """The processes and the leaders of their groups, which are the reapers."""
    return {*ids, *map(os.getpgid, ids)}


@pytest.mark.slow
def test_kill_9_of_the_launcher(launcher, pids):
    ids = with_reapers(pids.wait(*TREE))
    assert len(ids) == 6 and launcher.pid not in ids
    launcher.kill()
    pids.wait_gone(*ids, timeout_s=reaper.GRACE_S + 3)


def test_obedient_children_of_a_killed_launcher_end_at_once(launcher, pids):
    ids = with_reapers(pids.wait(*TREE)[:2])
    launcher.kill()
    pids.wait_gone(*ids, timeout_s=2)


@pytest.mark.slow
def test_a_launcher_that_ends_in_order(launcher, pids):
    """Ctrl-C: the launcher's own clean-up leaves nobody, the deaf ones included."""
    ids = with_reapers(pids.wait(*TREE, "launcher")[:-1])
    launcher.send_signal(signal.SIGINT)
    launcher.wait(timeout=reaper.GRACE_S + 10)
    pids.wait_gone(*ids, timeout_s=3)


@pytest.mark.parametrize("victim", ["child", "reaper"])
def test_kill_9_inside_is_noticed_and_cleaned_up(scripts, pids, victim, monkeypatch):
    monkeypatch.setattr(reaper, "GRACE_S", 0.5)
    with pytest.raises(ProcessDied, match="process 'two' ended with status 137"), LocalLauncher() as processes:
        processes.start("two", ["sh", str(scripts / "two.sh")], env={}, log=scripts / "two.log")
        child, grandchild = pids.wait("two", "two_grandchild")
        leader = os.getpgid(child)
        os.kill(child if victim == "child" else leader, signal.SIGKILL)
        pids.wait_gone(child, leader, timeout_s=2)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            processes.ensure_alive()
            time.sleep(0.02)
    pids.wait_gone(grandchild, timeout_s=3)
