"""What consoles print, whoever wrote it: nothing that a terminal would obey."""

import io
import os
import subprocess
import sys

from rich.live import Live
from rich.text import Text

from prl.base.terminal import Console
from prl.base.text import CONTROL

HOSTILE = "\x1b]0;mine\x07 \x1b[2J \x9b31m \u202ebackwards\u2066 \x08\x7f"
SHOWN = r"\x1b]0;mine\x07 \x1b[2J \x9b31m \u202ebackwards\u2066 \x08\x7f"


def test_colours_pass_and_text_is_harmless():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    console.print(Text(HOSTILE, "red"), soft_wrap=True)
    shown = SHOWN.replace(r"\x07", "").replace(r"\x08", "")  # which rich leaves out by itself
    assert console.file.getvalue() == f"\x1b[31m{shown}\x1b[0m\n"


def test_text_under_a_live_table_is_harmless(monkeypatch):
    """rich takes the streams over meanwhile, and prints by its console."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    raw = sys.stderr
    console = Console(stderr=True, force_terminal=True, color_system=None, width=200)
    with Live(Text("table"), console=console, refresh_per_second=1):
        print(f"an env says {HOSTILE}", file=sys.stderr)
        print("\x9b2J\u202e", file=sys.stdout)
    shown = raw.getvalue()
    for of_rich in ("\x1b[?25l", "\x1b[?25h", "\x1b[2K", "\x1b[1A", "\r"):  # the cursor hides, shows and goes up
        shown = shown.replace(of_rich, "")
    assert "an env says" in shown and "table" in shown and not CONTROL.search(shown)


WORKS = """
import pathlib, sys, time
from prl.monitors.console import Console
monitor = Console(mode="plain")
monitor.start(pathlib.Path("."), max_steps=3, run_config={})
sys.stdin.read()
for step in range(3):
    monitor.status(f"step {step}")
    print("of an env", file=sys.stderr, flush=True)
monitor.close()
print("at the end", flush=True)
"""


def test_run_goes_on_when_nobody_reads_its_output():
    reader, writer = os.pipe()
    command = [sys.executable, "-c", WORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writer, stderr=writer) as process:
        os.close(writer)
        os.close(reader)
        process.communicate()
    assert process.returncode == 0
