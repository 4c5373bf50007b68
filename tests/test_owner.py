"""A run directory has one owner."""

import os
import signal
import subprocess
import sys

import pytest

from prl.base.errors import ConfigError
from prl.runs.owner import is_owned, owned, refuse_owned

OWNS = """
import pathlib, sys, time
from prl.runs.owner import owned
with owned(pathlib.Path(sys.argv[1])):
    print("owns", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_naming_the_first(tmp_path):
    command = [sys.executable, "-c", OWNS, str(tmp_path / "x")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "owns\n" and is_owned(tmp_path / "x")
        for refused in (lambda: owned(tmp_path / "x").__enter__(), lambda: refuse_owned(tmp_path / "x")):
            with pytest.raises(ConfigError, match=rf"run\.dir=.*process {first.pid} on .*{sys.executable} -c "):
                refused()
        first.send_signal(signal.SIGKILL)
    assert not is_owned(tmp_path / "x")
    with owned(tmp_path / "x"):  # what a killed process has left is in nobody's way
        assert is_owned(tmp_path / "x")
        with pytest.raises(ConfigError, match=f"process {os.getpid()} "), owned(tmp_path / "x"):
            pass
    refuse_owned(tmp_path / "x")


def test_a_directory_without_a_run_has_no_owner(tmp_path):
    assert not is_owned(tmp_path / "x") and not is_owned(tmp_path)
    assert list(tmp_path.iterdir()) == []
