"""Start, watch and stop processes."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from engines import policy_spec
from patience import patient

from prl.base.errors import PrlError
from prl.engines.vllm.engine import VLLMEngine
from prl.launch.launcher import ProcessDied
from prl.launch.local import PORTS, LocalLauncher, free_port


def wait_status(process, timeout_s=10):
    deadline = time.monotonic() + patient(timeout_s)
    while process.status is None:
        assert time.monotonic() < deadline, f"{process.name} still runs"
        time.sleep(0.02)
    return process.status


def sh(script):
    return ["sh", "-c", script]


def test_normal_stop_asks_first(tmp_path, pids):
    """SIGTERM, time to put things in order, and no waiting for the whole grace period."""
    script = f'trap "echo bye; exit 0" TERM; echo $$ > {tmp_path}/a.pid; while :; do sleep 0.05; done'
    log = tmp_path / "a.log"
    with LocalLauncher() as processes:
        processes.start("a", sh(script), env={}, log=log)
        ids = pids.wait("a")
        processes.ensure_alive()
        started = time.monotonic()
    assert time.monotonic() - started < patient(2)
    assert log.read_text().splitlines()[-1] == "bye"
    pids.wait_gone(*ids, timeout_s=3)


def test_all_are_stopped_when_the_block_raises(tmp_path, pids, sleeper):
    with pytest.raises(KeyError), LocalLauncher() as processes:
        for name in ("a", "b"):
            processes.start(name, sh(sleeper(name)), env={}, log=tmp_path / f"{name}.log")
        ids = pids.wait("a", "b")
        raise KeyError
    pids.wait_gone(*ids, timeout_s=3)


def test_grandchildren_of_a_finished_process_end_with_it(tmp_path, pids, sleeper):
    """Also one with a session of its own."""
    script = f'setsid sh -c "{sleeper("grandchild").replace("$", chr(92) + "$")}" & '
    script += f"while [ ! -e {tmp_path}/grandchild.pid ]; do sleep 0.02; done; exit 0"
    with LocalLauncher() as processes:
        process = processes.start("a", sh(script), env={}, log=tmp_path / "a.log")
        ids = pids.wait("grandchild")
        assert wait_status(process) == 0
        pids.wait_gone(*ids, timeout_s=3)


VLLM_CORE = "(EngineCore pid=7) ERROR 11-25 18:21:13 [core.py:1433] NotImplementedError: No such attention."
CORE_KILLED = "its engine core was killed by SIGSEGV"
NOISY = r"""
echo '(EngineCore pid=7) INFO 09-01 10:00:00 [core.py:1] Initializing'
echo 'Loading safetensors checkpoint shards: 100% Completed | 1/1'
echo 'Traceback (most recent call last):'
echo 'MemoryError: no room'
for i in $(seq 30); do echo "resource_tracker.py:254: UserWarning: There appear to be $i leaked objects"; done
echo '(APIServer pid=1) INFO:     Application shutdown complete.'
exit 1
"""
ENDINGS = [
    ("trainer", "seq 9; echo trainer: x is full; exit 1", "status 1: x is full (its log: LOG)"),
    ("trainer", "exit 1", "status 1; its log: LOG"),
    ("engine", "echo out of memory; exit 7", "status 7; its log: LOG\nout of memory"),
    ("engine", r"printf '\377 oops'; exit 1", "status 1; its log: LOG\n� oops"),
    ("engine", "kill -9 $$", "status 137 (killed by SIGKILL (out of memory?)); its log: LOG"),
    ("engine", f"echo '{VLLM_CORE}'; exit 1", "status 1: NotImplementedError: No such attention. (its log: LOG)"),
    ("engine", f"echo {CORE_KILLED}; echo more", f"status 0: {CORE_KILLED} (its log: LOG)"),
    ("engine", NOISY, "status 1; its log: LOG\nTraceback (most recent call last):\nMemoryError: no room"),
]


@pytest.mark.parametrize(("name", "script", "says"), ENDINGS)
def test_a_dead_process_is_named_with_its_last_lines(tmp_path, sleeper, name, script, says):
    log = tmp_path / "logs" / "a.log"  # its folder is made
    with LocalLauncher() as processes:
        processes.start("healthy", sh(sleeper("healthy")), env={}, log=tmp_path / "h.log")
        explain = VLLMEngine.explain if name == "engine" else None
        wait_status(processes.start(name, sh(script), env={}, log=log, explain=explain))
        with pytest.raises(ProcessDied) as raised:
            processes.ensure_alive()
    assert str(raised.value) == f"process '{name}' ended with {says.replace('LOG', str(log))}"
    assert raised.value.process == name and "\n" not in raised.value.brief


def test_process_killed_by_a_signal_is_the_cause(tmp_path):
    """A rank of the trainer that loses another ends with an error of its own."""
    with LocalLauncher() as processes:
        for name, command in (("rank 0", "echo connection reset by peer; exit 1"), ("rank 1", "kill -9 $$")):
            wait_status(processes.start(name, sh(command), env={}, log=tmp_path / f"{name}.log"))
        with pytest.raises(ProcessDied, match="process 'rank 1' ended with status 137"):
            processes.ensure_alive()


def test_may_finish_allows_status_zero_only(tmp_path):
    with LocalLauncher() as processes:
        wait_status(processes.start("fine", sh("exit 0"), env={}, log=tmp_path / "a.log", may_finish=True))
        processes.ensure_alive()
        for name, status, may_finish in (("early", 0, False), ("failed", 1, True)):
            command = sh(f"exit {status}")
            wait_status(processes.start(name, command, env={}, log=tmp_path / f"{name}.log", may_finish=may_finish))
            with pytest.raises(ProcessDied, match=f"'{name}' ended with status {status}"):
                processes.ensure_alive()
            processes.processes.pop()


def test_ctrl_c_reaches_no_child(tmp_path, pids, sleeper):
    """Children are not in the terminal's foreground group: the launcher alone decides the order of the shutdown."""
    with LocalLauncher() as processes:
        processes.start("a", sh(sleeper("a")), env={}, log=tmp_path / "a.log")
        (pid,) = pids.wait("a")
        assert os.getpgid(pid) != os.getpgid(0) and os.getsid(pid) != os.getsid(0)
        assert os.getpgid(pid) == os.getpgid(os.getpgid(pid))  # the supervisor leads


async def test_the_engines_end_while_the_trainer_writes(tmp_path, pids, sleeper):
    """Nobody asks them any more. What is finished twice is stopped all the same."""
    with LocalLauncher() as processes:
        engine = processes.start("engine", sh(sleeper("engine")), env={}, log=tmp_path / "a.log")
        pids.wait("engine")  # what is asked before it runs has not heard it
        ended = f"grep -q 'State:.Z' /proc/{engine.pid}/status"
        command = sh(f"until {ended}; do sleep 0.02; done")
        processes.start("trainer", command, env={}, log=tmp_path / "b.log", may_finish=True)
        await processes.finish(20)
        await processes.finish(20)
        assert engine.returncode is None
    assert engine.returncode is not None


async def test_finish_waits_for_what_ends_by_itself(tmp_path):
    with LocalLauncher() as processes:
        processes.start("engine", sh("sleep 60"), env={}, log=tmp_path / "a.log")
        done = tmp_path / "done"
        processes.start("trainer", sh(f"sleep 0.5; touch {done}"), env={}, log=tmp_path / "b.log", may_finish=True)
        await processes.finish(10)
        assert done.exists()
        processes.start("late", sh("sleep 60"), env={}, log=tmp_path / "c.log", may_finish=True)
        with pytest.raises(PrlError, match="no end of training within 0.2 s"):
            await processes.finish(0.2)


def test_temporary_folder_is_private_and_gone_afterwards(tmp_path):
    with LocalLauncher() as processes:
        log = tmp_path / "a.log"
        for name in ("a", "b"):
            process = processes.start(name, sh("mktemp; echo $TMPDIR"), env={}, log=log)
            assert wait_status(process) == 0
        folder = processes.scratch
        assert sorted(folder.iterdir()) == sorted(Path(line) for line in log.read_text().split()[::2])
        assert log.read_text().split()[1] == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_an_engine_is_started_again_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(VLLMEngine, "command", lambda spec, port: sh(f"echo {port}; sleep 60"))
    with LocalLauncher() as processes:
        url = processes.start_engine(policy_spec("t", tmp_path / "a.log"))
        [first] = processes.processes
        os.killpg(first.pid, signal.SIGKILL)
        wait_status(first)
        assert not processes.restart_engine("another") and processes.restart_engine("engine")
        [second] = processes.processes
        assert second.status is None and second.pid != first.pid
        assert second.command == first.command and f"echo {url.rpartition(':')[2]};" in second.command[-1]


def test_a_free_port_is_none_that_connections_are_given(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port("127.0.0.1")))
        taken.listen()
        port = taken.getsockname()[1]
        assert port in PORTS
        monkeypatch.setattr("prl.launch.local.PORTS", [port] * 64)
        assert free_port("127.0.0.1") not in (0, port)
