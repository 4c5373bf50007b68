"""Who waits for whom, and which process is stopped, sleeps or spins: real processes, a clock that runs faster."""

import os
import signal
import sys
import time

import pytest
from patience import patient

from prl.launch import watchdog as module
from prl.launch.launcher import ProcessDied
from prl.launch.local import LocalLauncher
from prl.launch.watchdog import Watchdog
from prl.orchestrator.waiting import Waiting

WORDS = "the orchestrator waits for 12 rollouts of env math from the engine (3 requests)"
TRAINER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid()))\nwhile True: "
SPINS = pytest.mark.parametrize("watched", ["pass"], indirect=True)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(module, "QUIET_S", patient(0.3))
    monkeypatch.setattr(module, "LOOK_S", 0.05)


@pytest.fixture
def watched(request, fast, tmp_path, sleeper, pids):
    """`inference` and `trainer`, which sleep; with `SPINS`, the trainer spins."""
    code = TRAINER + getattr(request, "param", "time.sleep(0.1)")
    with LocalLauncher() as launcher:
        launcher.start("inference", ["sh", "-c", sleeper("inference")], env={}, log=tmp_path / "i.log")
        launcher.start(
            "trainer", [sys.executable, "-c", code, str(tmp_path / "trainer.pid")], env={}, log=tmp_path / "t.log"
        )
        pids.wait("inference", "trainer")
        yield launcher


class Run:
    """What a watchdog is shown, and what it says."""

    def __init__(self, launcher, process="inference", stopped_timeout_s=1e6, upper_s=1e6):
        self.done, self.said, self.process, self.upper_s = 0, [], process, upper_s
        self.dog = Watchdog(self.waiting, launcher.conditions, self.said.append, stopped_timeout_s)

    def waiting(self):
        return Waiting(WORDS, (self.process,), self.done, self.upper_s)

    def look_until(self, lines):
        """Look until that many lines have been said."""
        end = time.monotonic() + patient(10)
        while len(self.said) < lines:
            assert time.monotonic() < end, self.said
            self.dog.look()
            time.sleep(0.02)

    def look_for(self, seconds):
        end = time.monotonic() + patient(seconds)
        while time.monotonic() < end:
            self.dog.look()
            time.sleep(0.02)


def test_it_says_who_waits_for_whom_at_growing_intervals_and_when_it_goes_on(watched):
    run, started = Run(watched), time.monotonic()
    for count, at_s in enumerate((0.3, 0.6, 1.2), 1):
        run.look_until(count)
        assert time.monotonic() - started > patient(at_s)
    assert all(line.startswith("no progress for ") and WORDS in line for line in run.said)
    assert "process inference sleeps, at 0.0" in run.said[0] and "trainer" not in run.said[0]
    run.done += 1
    run.look_until(4)
    assert run.said[3].startswith("going on after ")
    started = time.monotonic()
    run.look_until(5)
    assert time.monotonic() - started < patient(1.2), "the intervals begin anew"


def test_progress_is_silence(watched):
    run = Run(watched)
    for _ in range(30):
        run.done += 1
        run.look_for(0.02)
    assert run.said == []


@SPINS
def test_a_process_that_spins_is_named_and_not_given_up(watched):
    run = Run(watched, "trainer", upper_s=0.2)
    run.look_for(0.9)
    assert "process trainer" in run.said[-1] and ("spins" in run.said[-1] or "works" in run.said[-1])


def test_a_stopped_process_is_named_whoever_is_waited_for_and_given_up_in_the_end(watched, pids):
    (trainer,) = pids.wait("trainer")
    os.kill(trainer, signal.SIGSTOP)
    run = Run(watched, stopped_timeout_s=patient(0.8))
    with pytest.raises(ProcessDied, match=rf"process 'trainer' was stopped for .* process {trainer}, state T") as died:
        run.look_for(5)
    assert died.value.process == "trainer" and WORDS in str(died.value)
    assert f"process trainer is stopped: {os.path.basename(sys.executable)}, process {trainer}, state T" in run.said[0]


def test_a_process_that_is_continued_is_not_given_up(watched, pids):
    (inference,) = pids.wait("inference")
    run = Run(watched, stopped_timeout_s=patient(0.8))
    for _ in range(2):
        os.kill(inference, signal.SIGSTOP)
        run.look_for(0.5)
        os.kill(inference, signal.SIGCONT)
        run.look_for(0.2)
    assert any("is stopped" in line for line in run.said)


def test_a_sleeping_process_has_the_configured_deadline(watched):
    run = Run(watched, upper_s=0.6)
    with pytest.raises(ProcessDied, match="process 'inference' has slept for [0-9]+ s while the orchestrator waits"):
        run.look_for(5)


@SPINS
@pytest.mark.parametrize("stopped", [False, True])
def test_at_the_start_every_process_is_named_and_one_that_works_is_given_longer(watched, pids, monkeypatch, stopped):
    monkeypatch.setattr(module, "START_S", patient(2.0))
    run, started = Run(watched), time.monotonic()
    run.dog.waiting = lambda: Waiting("the start waits for the engine", (), (), 1e6, starting=True)
    if stopped:
        os.kill(pids.wait("inference")[0], signal.SIGSTOP)
    run.look_until(1)
    assert (time.monotonic() - started > patient(2)) != stopped
    assert run.said[0].startswith("starting, nothing new for ") and "process trainer " in run.said[0]
    assert f"process inference {'is stopped' if stopped else 'sleeps'}" in run.said[0]
    run.look_for(0.2)
    assert len(run.said) == 1, "and not again at once"
