"""Children that say who they are, and a look at which processes are left."""

import contextlib
import os
import signal
import time

import pytest


def gone(pid):
    """Whether no process of this id runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(name="gone")
def _gone():
    return gone


class Pids:
    """Processes write their ids to files in `folder`; whoever is left is ended with the test, by id."""

    def __init__(self, folder):
        self.folder = folder

    def wait(self, *names, timeout_s=20):
        """The ids of the named processes, once all have written theirs."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = [path.read_text().strip() if (path := self.folder / f"{n}.pid").exists() else "" for n in names]
            if all(found):
                return [int(pid) for pid in found]
            assert time.monotonic() < deadline, f"no id of {names}: {found}"
            time.sleep(0.02)

    def wait_gone(self, *pids, timeout_s):
        deadline = time.monotonic() + timeout_s
        while left := [pid for pid in pids if not gone(pid)]:
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.02)


@pytest.fixture
def pids(tmp_path):
    yield Pids(tmp_path)
    for path in tmp_path.glob("*.pid"):
        pid = int(path.read_text().strip() or 0)
        if pid and not gone(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def sleeper(tmp_path):
    """`sleeper(name, setup="")`: a shell command that writes its id and sleeps in steps."""

    def make(name, setup=""):
        path = tmp_path / name  # moved into place, so that a reader never finds it empty
        return f"{setup} echo $$ > {path}.tmp; mv {path}.tmp {path}.pid; while :; do sleep 0.1; done"

    return make
