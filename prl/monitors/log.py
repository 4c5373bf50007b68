"""The log of a process: everything in a file, warnings of prl and of the user's modules in the terminal as well."""

import contextlib
import logging
import os
import re
import sys
import sysconfig
from logging.handlers import MemoryHandler
from pathlib import Path

from prl.base.files import naming
from prl.base.text import as_message

QUIET = ("httpx", "aiohttp.access", "asyncio")
"""Loggers that say something at every request: only their warnings are logged."""


class Harmless(logging.Formatter):
    """A formatter that makes text of a model, an env or a server harmless: it steers no terminal and begins no line."""

    def format(self, record: logging.LogRecord) -> str:
        return as_message(super().format(record))


class Terminal(logging.Handler):
    """Warnings on standard error, one line each: prl's and those of a user's modules. A library's are for the log."""

    WARNING = re.compile(r"(?P<file>.+?):\d+: \w+: (?P<text>.*?)(\n  .*)?", re.DOTALL)
    """Line that `logging` makes of a warning of Python's."""
    LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    OWN = str(Path(__file__).parents[1]) + os.sep

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.setFormatter(Harmless("%(levelname)s: %(message)s"))

    def filter(self, record: logging.LogRecord) -> bool:
        file, _ = self.parts_of(record)
        return file.startswith(self.OWN) or not file.startswith(self.LIBRARIES)

    def parts_of(self, record: logging.LogRecord) -> tuple[str, str]:
        """Return the file that a record is about, and its text."""
        text = record.getMessage()
        warning = self.WARNING.fullmatch(text.rstrip()) if record.name == "py.warnings" else None
        return (warning["file"], warning["text"]) if warning else (record.pathname, text)

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone; the log has it
            print(self.format(record), file=sys.stderr, flush=True)

    def format(self, record: logging.LogRecord) -> str:
        _, text = self.parts_of(record)
        text = "; ".join(line.strip() for line in text.splitlines() if line.strip())
        return super().format(logging.makeLogRecord({**vars(record), "msg": "%s", "args": (text,)}))


def hold_log() -> MemoryHandler:
    """Show warnings in the terminal from now on, and keep the log until `log_to` has a file for it."""
    memory = MemoryHandler(capacity=100_000, flushLevel=logging.CRITICAL + 1)
    logging.basicConfig(level=logging.INFO, handlers=[memory, Terminal()], force=True)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False  # Hydra has switched off those that there were
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    return memory


def log_to(path: Path, memory: MemoryHandler) -> None:
    """Write this process's log to `path`, what was kept in `memory` first."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(Harmless("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    memory.setTarget(file)
    memory.flush()
    root = logging.getLogger()
    root.removeHandler(memory)
    root.addHandler(file)
