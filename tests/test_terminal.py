"""What a command prints, whoever wrote it: nothing that a terminal would obey."""

import io
import os
import subprocess
import sys

import pytest
from rich.live import Live
from rich.text import Text

from prl import terminal
from prl.text import CONTROL

HOSTILE = "\x1b]0;mine\x07 \x1b[2J \x9b31m \u202ebackwards\u2066 \x08\x7f"
SHOWN = r"\x1b]0;mine\x07 \x1b[2J \x9b31m \u202ebackwards\u2066 \x08\x7f"


@pytest.fixture
def guarded(monkeypatch):
    """`guarded()`: standard output and error are guarded; returns what reaches the terminal."""

    def replace():
        raw = io.StringIO(), io.StringIO()
        for name, stream in zip(("stdout", "stderr"), raw, strict=True):
            monkeypatch.setattr(sys, name, stream)
        terminal.guard()
        return raw

    return replace


def test_whatever_is_printed_is_harmless_on_both_streams(guarded):
    streams = guarded()
    terminal.guard()
    for stream, raw in zip((sys.stdout, sys.stderr), streams, strict=True):
        print(HOSTILE, 3, file=stream, flush=True)
        stream.writelines(["a\tb\n", "50 %\r100 %\r\n"])
        assert raw.getvalue() == f"{SHOWN} 3\na\tb\n50 %\n100 %\n"
        assert not stream.isatty() and stream.write("four") == 4


def test_colours_of_our_consoles_pass_and_their_text_is_harmless(guarded):
    streams = guarded()
    console = terminal.Console(force_terminal=True, color_system="standard", width=200)
    console.print(Text(HOSTILE, "red"), soft_wrap=True)
    shown = SHOWN.replace(r"\x07", "").replace(r"\x08", "")  # which rich leaves out by itself
    assert streams[0].getvalue() == f"\x1b[31m{shown}\x1b[0m\n"


def test_what_is_printed_under_a_live_table_is_harmless_too(guarded):
    """rich takes the streams over meanwhile, and prints by its console."""
    streams = guarded()
    console = terminal.Console(stderr=True, force_terminal=True, color_system=None, width=200)
    with Live(Text("table"), console=console, refresh_per_second=1):
        print(f"an env says {HOSTILE}", file=sys.stderr)
        print("\x9b2J\u202e", file=sys.stdout)
    said = streams[1].getvalue() + streams[0].getvalue()
    ours = ("\x1b[?25l", "\x1b[?25h", "\x1b[2K", "\x1b[1A", "\r")  # the cursor is hidden, shown, and goes up a line
    for sequence in ours:
        said = said.replace(sequence, "")
    assert "an env says" in said and "table" in said and not CONTROL.search(said)
    assert r"\x1b[2K" not in said, "the table's own way up is not for reading"


def test_what_the_locale_cannot_say_is_written_out():
    ascii_only = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    code = "from prl.terminal import guard; guard(); print('more \\u2026')"
    done = subprocess.run([sys.executable, "-c", code], env=ascii_only, capture_output=True, check=True)
    assert done.stdout == b"more \\u2026\n"


WORKS = """
import logging, pathlib, sys, time
from rich.live import Live
from prl import terminal
from prl.log import hold_log, log_to
from prl.monitors.console import Console
if sys.argv[2] == "outlasts":
    terminal.outlast()
log_to(pathlib.Path(sys.argv[1]) / "log", hold_log())
live = Console(mode=sys.argv[3])
live.start(pathlib.Path("."), max_steps=3, run_config={})
sys.stdin.read()
for step in range(3):
    live.status(f"step {step}")
    print("of an env")
    logging.getLogger("prl").warning("of prl")
    time.sleep(0.3)
live.close()
print("at the end")
print("at the end", file=sys.stderr)
"""


@pytest.fixture
def works(tmp_path):
    """`works(reader, mode, outlasts)`: a process whose reader goes once it has started; its status and its log."""

    def run(reader, mode, outlasts="outlasts"):
        read, write = os.pipe() if reader == "pipe" else os.openpty()
        command = [sys.executable, "-c", WORKS, str(tmp_path), outlasts, mode]
        environment = {**os.environ, "TTY_COMPATIBLE": "1", "TERM": "xterm"}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write, stderr=write, env=environment) as process:
            os.close(write)
            if mode == "live":
                os.read(read, 100)
            os.close(read)
            process.communicate()
        return process.returncode, (tmp_path / "log").read_text()

    return run


@pytest.mark.parametrize("reader", ["pipe", "terminal"])
@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_command_that_works_outlasts_its_readers(works, reader, mode):
    status, log = works(reader, mode)
    assert status == 0 and log.count("WARNING prl: of prl") == 3 and "step 2" in log


def test_any_other_ends_with_its_reader(works):
    status, log = works("pipe", "plain", "prints")
    assert status != 0 and "step 2" not in log


def test_a_refusal_that_nobody_reads_keeps_its_status(tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "prl.train", "max_stepz=3", f"run.dir={tmp_path}/run"]
    done = subprocess.run(command, stdout=write, stderr=write, cwd=tmp_path)
    os.close(write)
    assert done.returncode == 2


TASKSET = """
import sys, warnings
import verifiers.v1 as vf
__all__ = ["T"]
EVIL = {evil!r}
print("loading", EVIL)
print("loading", EVIL, file=sys.stderr)
class Task(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        print("grading", EVIL)
        raise ValueError("no reward for " + EVIL)
class T(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(prompt="say " + EVIL))
"""


def test_an_env_prints_raises_and_asks_what_it_likes(tmp_path, monkeypatch, capfd):
    from prl import env

    (tmp_path / "hostile_env.py").write_text(TASKSET.format(evil=HOSTILE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["prl env", "check", "hostile_env", "--reply", HOSTILE])
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # put back afterwards
    with pytest.raises(SystemExit):
        env.main()
    out, err = capfd.readouterr()
    assert f"loading {SHOWN}" in out and f"loading {SHOWN}" in err and f"grading {SHOWN}" in out
    assert f"say {SHOWN}" in out and f"no reward for {SHOWN}" in err and "this config imports hostile_env" in err
    assert not CONTROL.search(out) and not CONTROL.search(err)
