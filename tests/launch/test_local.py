"""Start, watch and stop processes."""

import asyncio
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from patience import patient

from prl.config.schema import InferenceConfig, ModelConfig
from prl.errors import PrlError
from prl.launch import children
from prl.launch.launcher import EngineSpec, ProcessDied
from prl.launch.local import LocalLauncher, free_port, model_environment
from prl.launch.processes import LOG_TAIL_LINES
from prl.models import model_path


def wait_status(process, timeout_s=10):
    deadline = time.monotonic() + patient(timeout_s)
    while process.status is None:
        assert time.monotonic() < deadline, f"{process.name} still runs"
        time.sleep(0.02)
    return process.status


def sh(script):
    return ["sh", "-c", script]


def test_output_environment_and_status(tmp_path):
    with LocalLauncher() as processes:
        log = tmp_path / "logs" / "a.log"  # its folder is made
        process = processes.start("a", sh('echo "out $WORD"; echo err >&2; exit 3'), env={"WORD": "hello"}, log=log)
        assert wait_status(process) == 3
        assert process.status == 3  # asking again changes nothing
    assert log.read_text().split() == ["out", "hello", "err"]
    assert process.status == 3  # nor does stopping
    assert os.environ.get("WORD") is None


def test_a_restart_appends_to_the_log(tmp_path):
    for word in ("one", "two"):
        with LocalLauncher() as processes:
            wait_status(processes.start("a", sh(f"echo {word}"), env={}, log=tmp_path / "a.log"))
    assert (tmp_path / "a.log").read_text().split() == ["one", "two"]


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


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path, pids, sleeper, monkeypatch):
    monkeypatch.setattr(children, "GRACE_S", 0.6)
    with LocalLauncher() as processes:
        processes.start("deaf", sh(sleeper("deaf", setup="trap '' TERM;")), env={}, log=tmp_path / "a.log")
        ids = pids.wait("deaf")
        started = time.monotonic()
    assert 0.5 < time.monotonic() - started < patient(3)
    pids.wait_gone(*ids, timeout_s=3)


def test_deaf_children_share_one_grace_period(tmp_path, pids, sleeper, monkeypatch):
    monkeypatch.setattr(children, "GRACE_S", patient(0.6))
    names = ["a", "b", "c", "d"]
    with LocalLauncher() as processes:
        for name in names:
            command = sh(sleeper(name, setup="trap '' TERM;"))
            processes.start(name, command, env={}, log=tmp_path / f"{name}.log")
        ids = pids.wait(*names)
        started = time.monotonic()
    assert time.monotonic() - started < 2.5 * children.GRACE_S, "one after another would be four"
    pids.wait_gone(*ids, timeout_s=3)


def test_grandchildren_end_too(tmp_path, pids, sleeper):
    """Also deaf ones whose parent left in good order."""
    deaf = sleeper("grandchild", setup="trap '' TERM;")
    script = f'sh -c "{deaf.replace("$", chr(92) + "$")}" & ' + sleeper("child")
    with LocalLauncher() as processes:
        processes.start("a", sh(script), env={}, log=tmp_path / "a.log")
        ids = pids.wait("child", "grandchild")
        assert len(set(ids)) == 2
        assert {os.getpgid(pid) for pid in ids} != {os.getpgid(0)}
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


def test_what_a_process_says_of_its_end_is_the_cause(tmp_path):
    log = tmp_path / "trainer.log"
    with LocalLauncher() as processes:
        wait_status(processes.start("trainer", sh("seq 9; echo trainer: x is full; exit 1"), env={}, log=log))
        with pytest.raises(ProcessDied) as raised:
            processes.ensure_alive()
    assert str(raised.value) == f"process 'trainer' ended with status 1: x is full (its log: {log})"


def test_a_process_that_could_not_even_say_why(tmp_path):
    with LocalLauncher() as processes:
        wait_status(processes.start("trainer", sh("exit 1"), env={}, log=tmp_path / "a.log"))
        with pytest.raises(ProcessDied, match=rf"status 1; its log: {tmp_path}/a.log$"):
            processes.ensure_alive()


def test_process_died_says_who_how_and_what_it_last_said(tmp_path, sleeper):
    log = tmp_path / "engine.log"
    with LocalLauncher() as processes:
        processes.start("healthy", sh(sleeper("healthy")), env={}, log=tmp_path / "h.log")
        process = processes.start("engine", sh("seq 1 60; echo out of memory; exit 7"), env={}, log=log)
        wait_status(process)
        with pytest.raises(ProcessDied) as raised:
            processes.ensure_alive()
    message = str(raised.value)
    assert message.startswith(f"process 'engine' ended with status 7; its log: {log}\n")
    assert message.endswith("60\nout of memory")
    lines = message.splitlines()[1:]
    assert len(lines) == LOG_TAIL_LINES and lines[0] == str(61 - LOG_TAIL_LINES + 1)
    assert isinstance(raised.value, PrlError)  # shown to the user as it is
    assert raised.value.brief == f"process 'engine' ended with status 7; its log: {log}"


def test_a_log_that_is_not_text_does_not_hide_the_death(tmp_path):
    with LocalLauncher() as processes:
        process = processes.start("a", sh(r"printf '\377\376 oops'; exit 1"), env={}, log=tmp_path / "a.log")
        wait_status(process)
        with pytest.raises(ProcessDied, match="oops"):
            processes.ensure_alive()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_status_of_a_child_killed_by_a_signal(tmp_path, number):
    with LocalLauncher() as processes:
        process = processes.start("a", sh(f"kill -{int(number)} $$"), env={}, log=tmp_path / "a.log")
        assert wait_status(process) == 128 + number


def test_of_two_that_ended_the_one_that_a_signal_ended_is_the_cause(tmp_path):
    """A rank of the trainer that loses another ends with an error of its own."""
    with LocalLauncher() as processes:
        for name, command in (("rank 0", "echo connection reset by peer; exit 1"), ("rank 1", "kill -9 $$")):
            wait_status(processes.start(name, sh(command), env={}, log=tmp_path / f"{name}.log"))
        with pytest.raises(ProcessDied, match="process 'rank 1' ended with status 137"):
            processes.ensure_alive()


def test_a_command_that_does_not_exist(tmp_path):
    with LocalLauncher() as processes:
        process = processes.start("a", ["/no/such/program"], env={}, log=tmp_path / "a.log")
        wait_status(process)
        with pytest.raises(ProcessDied, match="process 'a' ended with status 1(.|\n)*/no/such/program"):
            processes.ensure_alive()


def test_may_finish_allows_status_zero_only(tmp_path):
    with LocalLauncher() as processes:
        fine = processes.start("trainer", sh("exit 0"), env={}, log=tmp_path / "a.log")
        wait_status(fine)
        with pytest.raises(ProcessDied, match="'trainer' ended with status 0"):
            processes.ensure_alive()
        fine.may_finish = True
        processes.ensure_alive()
        failed = processes.start("other", sh("exit 1"), env={}, log=tmp_path / "b.log")
        failed.may_finish = True
        wait_status(failed)
        with pytest.raises(ProcessDied, match="'other' ended with status 1"):
            processes.ensure_alive()


async def test_watch_raises_soon(tmp_path):
    with LocalLauncher() as processes:
        processes.start("a", sh("sleep 0.3; echo last words; exit 5"), env={}, log=tmp_path / "a.log")
        with pytest.raises(ProcessDied, match="status 5(.|\n)*last words"):
            await asyncio.wait_for(processes.watch(), 5)


async def test_watch_does_not_return_while_all_is_well(tmp_path, sleeper):
    with LocalLauncher() as processes:
        processes.start("a", sh(sleeper("a")), env={}, log=tmp_path / "a.log")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(processes.watch(), 0.5)


def test_ctrl_c_reaches_no_child(tmp_path, pids, sleeper):
    """Children are not in the terminal's foreground group: the launcher alone decides the order of the shutdown."""
    with LocalLauncher() as processes:
        processes.start("a", sh(sleeper("a")), env={}, log=tmp_path / "a.log")
        (pid,) = pids.wait("a")
        assert os.getpgid(pid) != os.getpgid(0) and os.getsid(pid) != os.getsid(0)
        assert os.getpgid(pid) == os.getpgid(os.getpgid(pid))  # the supervisor leads


def test_free_port():
    port = free_port("127.0.0.1")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))


async def test_the_engines_end_while_the_trainer_writes(tmp_path):
    """Nobody asks them any more. What is finished twice is stopped all the same."""
    with LocalLauncher() as processes:
        engine = processes.start("engine", sh("sleep 60"), env={}, log=tmp_path / "a.log")
        ended = f"grep -q 'State:.Z' /proc/{engine.pid}/status"
        trainer = processes.start("trainer", sh(f"until {ended}; do sleep 0.02; done"), env={}, log=tmp_path / "b.log")
        trainer.may_finish = True
        await processes.finish(20)
        await processes.finish(20)
        assert engine.returncode is None
    assert engine.returncode is not None


async def test_finish_waits_for_what_ends_by_itself(tmp_path):
    with LocalLauncher() as processes:
        processes.start("engine", sh("sleep 60"), env={}, log=tmp_path / "a.log")
        done = tmp_path / "done"
        processes.start("trainer", sh(f"sleep 0.5; touch {done}"), env={}, log=tmp_path / "b.log").may_finish = True
        await processes.finish(10)
        assert done.exists()
        processes.start("late", sh("sleep 60"), env={}, log=tmp_path / "c.log").may_finish = True
        with pytest.raises(PrlError, match="process 'late' had not ended 0.2 s after the last step"):
            await processes.finish(0.2)


async def test_finish_notices_a_failure(tmp_path):
    with LocalLauncher() as processes:
        processes.start("trainer", sh("sleep 0.2; exit 3"), env={}, log=tmp_path / "b.log").may_finish = True
        with pytest.raises(ProcessDied, match="'trainer' ended with status 3"):
            await processes.finish(10)


def test_temporary_files_are_in_a_folder_of_their_own_that_is_gone_afterwards(tmp_path):
    with LocalLauncher() as processes:
        log = tmp_path / "a.log"
        for name in ("a", "b"):
            process = processes.start(name, sh("mktemp; echo $VLLM_RPC_BASE_PATH"), env={}, log=log)
            assert wait_status(process) == 0
        folder = processes.scratch
        assert sorted(folder.iterdir()) == sorted(Path(line) for line in log.read_text().split()[::2])
        assert log.read_text().split()[1] == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


NOISY = r"""
echo '(EngineCore pid=7) INFO 09-01 10:00:00 [core.py:1] Initializing'
echo 'Loading safetensors checkpoint shards: 100% Completed | 1/1'
echo 'Traceback (most recent call last):'
echo '  File "core.py", line 3, in step'
echo 'MemoryError: no room'
for i in $(seq 30); do
    echo "resource_tracker.py:254: UserWarning: There appear to be $i leaked shared_memory objects"
    echo "  warnings.warn("
done
echo '(APIServer pid=1) INFO:     Application shutdown complete.'
echo ' 50%|#####     | 5/10 [00:01<00:01]'
exit 1
"""


def test_the_last_words_are_those_that_may_tell_why(tmp_path):
    with LocalLauncher() as processes:
        wait_status(processes.start("inference", sh(NOISY), env={}, log=tmp_path / "a.log"))
        with pytest.raises(ProcessDied) as raised:
            processes.ensure_alive()
    said = ["Traceback (most recent call last):", '  File "core.py", line 3, in step', "MemoryError: no room"]
    assert str(raised.value).splitlines()[1:] == said


def test_a_server_whose_core_failed_says_why_in_a_line(tmp_path):
    """Not what the server itself makes of it afterwards."""
    core = "echo '(EngineCore pid=7) ERROR 11-25 18:21:13 [core.py:1433] NotImplementedError: No such attention.'"
    script = f"{core}\necho 'RuntimeError: Engine core initialization failed.'\nexit 1"
    with LocalLauncher() as processes:
        wait_status(processes.start("inference", sh(script), env={}, log=tmp_path / "a.log"))
        with pytest.raises(ProcessDied) as raised:
            processes.ensure_alive()
    said = (
        f"process 'inference' ended with status 1: NotImplementedError: No such attention. (its log: {tmp_path}/a.log)"
    )
    assert str(raised.value) == said


def test_an_engine_waits_until_what_is_left_of_its_predecessor_has_left_the_port(tmp_path):
    spec = EngineSpec(
        process="inference",
        served_name="policy",
        model=ModelConfig(path=model_path("tiny"), dtype="float32", max_model_len=64),
        config=InferenceConfig(),
        device="cpu",
        seed=0,
        token="t0ken",
        log=tmp_path / "inference.log",
    )
    with LocalLauncher() as processes:
        port = int(processes.start_engine(spec).rpartition(":")[2])
        processes.processes[0].end()
        left = socket.create_server(("127.0.0.1", port))
        started = time.monotonic()
        threading.Timer(0.5, left.close).start()
        assert processes.restart_engine("inference") and time.monotonic() - started > 0.4


def test_what_torch_compiles_is_kept_unless_the_user_says_where(monkeypatch, tmp_path):
    model = ModelConfig(path="tiny", dtype="float32", max_model_len=64)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_environment(model, 1)["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "prl" / "torchinductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/theirs")
    assert model_environment(model, 1)["TORCHINDUCTOR_CACHE_DIR"] == "/theirs"
