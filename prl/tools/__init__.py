"""Tools that look at runs from outside: pages, tables, predictions, rollouts, chat, evaluation, sweeps.

Start with the tool's own package or module; a command of `prl/__main__.py` has each. Nothing in prl but the commands
imports these; they may import all.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from prl.base.errors import PrlError
from prl.base.text import as_message

OUTPUTS = Path("outputs")
"""Folder of runs that name no other."""


def named(path: Path) -> Path:
    """Return the path that an argument of a command names: itself, or its namesake under `outputs/` if only
    that exists."""
    return OUTPUTS / path if not path.exists() and (OUTPUTS / path).exists() else path


def line_of(error: str | None) -> str:
    """A run's error in a line: its first, of a traceback its last."""
    lines = (error or "").strip().splitlines() or [""]
    return lines[-1 if lines[0].startswith("Traceback") else 0]


def run_command(
    command: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, argv: list[str] | None
) -> int:
    """Run a command. Returns its exit status: 0 = done; 2 = what the arguments name is not there, or cannot be used."""
    try:
        command(parser.parse_args(argv))
    except (PrlError, OSError) as error:
        print(f"error: {as_message(str(error))}", file=sys.stderr)
        return 2
    return 0
