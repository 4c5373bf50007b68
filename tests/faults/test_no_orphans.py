"""However a part of a run is killed, no process of it stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prl import reaper, scratch
from prl.launch.launcher import ProcessDied
from prl.launch.local import LocalLauncher

LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from prl.launch.local import LocalLauncher
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has put the tests into the background
folder = Path(sys.argv[1])
with LocalLauncher() as processes:
    for name in ("one", "two"):
        processes.start(name, ["sh", str(folder / f"{name}.sh")], env={}, log=folder / f"{name}.log")
    (folder / "scratch").write_text(f"{processes.scratch.path} {processes.scratch.keeper.pid}")
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


@pytest.mark.parametrize("order", ["launcher first", "shims first", "the keeper too"])
def test_kill_9_of_the_launcher_and_both_shims(launcher, scripts, pids, order, monkeypatch):
    """Grandchildren that ignore SIGTERM and know nothing of prl, and the folder for their temporary files."""
    ids = pids.wait(*TREE, "launcher")[:-1]
    shims = with_reapers(ids) - set(ids)
    folder, keeper = (scripts / "scratch").read_text().split()
    Path(folder, "socket").touch()
    victims = [launcher.pid, *shims] if order == "launcher first" else [*shims, launcher.pid]
    for pid in victims if order != "the keeper too" else [int(keeper), *victims]:
        os.kill(pid, signal.SIGKILL)
    if order == "the keeper too":  # then the kernel has ended the children, and the next launcher ends the others
        pids.wait_gone(ids[0], ids[2], timeout_s=20)
        monkeypatch.setattr(scratch, "YOUNG_S", 0.0)
        scratch.clear_stale(Path(folder).parent)
    pids.wait_gone(
        *ids, *shims, timeout_s=60
    )  # a launcher of another test may be the next one, and clear up with grace
    deadline = time.monotonic() + 20
    while Path(folder).exists():
        assert time.monotonic() < deadline, os.listdir(folder)
        time.sleep(0.02)


def test_a_process_whose_name_is_no_text_is_a_process_like_any_other():
    """The kernel cuts names after 15 bytes, in the middle of a character too."""
    naming = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'half \\xc3'); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", naming], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert b"\xc3)" in Path(f"/proc/{process.pid}/stat").read_bytes()
        assert reaper.parents()[process.pid] == os.getpid()
    finally:
        process.kill()
        process.communicate()


def test_a_folder_in_use_is_not_stale(monkeypatch):
    monkeypatch.setattr(scratch, "YOUNG_S", 0.0)
    mine = scratch.Scratch()
    try:
        assert mine.path.stat().st_mode & 0o777 == 0o700
        scratch.clear_stale(mine.path.parent)
        assert mine.path.is_dir()
    finally:
        mine.remove()
    assert not mine.path.exists() and mine.keeper.returncode == 0


def test_a_stopped_keeper_does_not_stay(monkeypatch):
    monkeypatch.setattr(scratch, "LEAVING_S", 0.3)
    mine = scratch.Scratch()
    os.kill(mine.keeper.pid, signal.SIGSTOP)
    mine.remove()
    assert not mine.path.exists() and mine.keeper.returncode == -signal.SIGKILL


def test_a_folder_is_short_enough_for_sockets_however_long_the_path_of_temporary_files(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(deep))
    mine = scratch.Scratch()
    mine.remove()
    name = "0f0085c3-592e-4785-b468-663333be919c"  # as vLLM has them
    assert len(str(mine.path / name)) < 108


SPAWNING = """
import multiprocessing, os, sys, tempfile, time
from multiprocessing import shared_memory
from pathlib import Path
from prl import reaper, scratch
if __name__ in ("__main__", "__mp_main__"):
    reaper.tie()
    scratch.name_shared_memory()

def work(folder, lock):
    memory = shared_memory.SharedMemory(create=True, size=64)
    (folder / "memory.txt").write_text(f"{memory.name} {tempfile.mkdtemp()}")
    (folder / "core.tmp").write_text(str(os.getpid()))
    os.rename(folder / "core.tmp", folder / "core.pid")
    time.sleep(120)

if __name__ == "__main__":
    folder, spawn = Path(sys.argv[1]), multiprocessing.get_context("spawn")
    lock = spawn.Lock()
    core = spawn.Process(target=work, args=(folder, lock), name="EngineCore")
    core.start()
    print("INFO 09-01 serving")
    core.join()
    print("ERROR 09-01 the core is dead")
    print("resource_tracker.py:254: UserWarning: There appear to be 3 leaked shared_memory objects", flush=True)
"""


@pytest.fixture
def server(tmp_path):
    """A command of a process with a core of its own, as vLLM's."""
    path = tmp_path / "server.py"
    path.write_text(SPAWNING)
    return [sys.executable, str(path), str(tmp_path)]


def test_a_killed_core_is_the_cause_and_leaves_no_shared_memory(server, tmp_path, pids):
    with LocalLauncher() as processes:
        process = processes.start("inference", server, env={}, log=tmp_path / "a.log")
        [core] = pids.wait("core")
        folder, (memory, temporary) = processes.scratch.path, (tmp_path / "memory.txt").read_text().split()
        assert Path("/dev/shm", memory).exists() and Path(temporary).parent == folder
        named = [path.name for path in Path("/dev/shm").glob(f"*{scratch.memory_name(folder)}*")]
        assert len(named) == 2  # the lock's semaphore too
        os.kill(core, signal.SIGKILL)
        while process.status is None:
            time.sleep(0.02)
        with pytest.raises(ProcessDied) as raised:
            processes.ensure_alive()
    assert str(raised.value).splitlines() == [
        f"process 'inference' ended with status 0: EngineCore (process {core}) was killed by SIGKILL (out of memory?); "
        f"its last log lines ({tmp_path}/a.log):",
        "ERROR 09-01 the core is dead",
    ]
    assert not folder.exists() and not any(Path("/dev/shm", name).exists() for name in named)


KILLING = """
import multiprocessing, os, signal, threading, time
from multiprocessing import connection
from prl import reaper

def work(slow):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if slow:
        os.closerange(3, 100)
    time.sleep(120)

if __name__ == "__main__":
    reaper.tie()
    spawn = multiprocessing.get_context("fork")
    cores = [spawn.Process(target=work, args=(name == "Other",), name=name) for name in ("EngineCore", "Other")]
    for core in cores:
        core.start()
    time.sleep(0.5)
    cores[0].terminate()
    os.kill(cores[0].pid, signal.SIGKILL)  # as vLLM ends a core that does not
    threading.Timer(0.5, os.kill, (cores[1].pid, signal.SIGKILL)).start()
    multiprocessing.connection.wait([cores[1].sentinel])
    cores[1].terminate()  # of one that is ending, as the kernel closes its files before it says so
    for core in cores:
        core.join()
"""


def test_a_core_that_its_own_server_killed_was_killed_by_nobody_else():
    done = subprocess.run([sys.executable, "-c", KILLING], capture_output=True, text=True, timeout=60, check=True)
    [said] = done.stderr.splitlines()
    assert said.startswith("prl: Other (process ") and said.endswith("was killed by SIGKILL (out of memory?)")


def test_a_core_ends_with_its_server_whoever_is_left(server, tmp_path, pids):
    """The kernel ends it: neither the reaper nor the keeper has been told anything yet."""
    with LocalLauncher() as processes:
        processes.start("inference", server, env={}, log=tmp_path / "a.log")
        [core] = pids.wait("core")
        parent = reaper.parents()[core]
        os.kill(reaper.parents()[parent], signal.SIGSTOP)  # continued when the block ends
        os.kill(parent, signal.SIGKILL)
        pids.wait_gone(core, timeout_s=2)
