"""The run directory: refuse one that holds a run, write what a run begins and ends with."""

import contextlib
import fcntl
import logging
import os
import re
import sys
import sysconfig
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TextIO

import msgspec
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from prl.config.instantiate import plain
from prl.config.schema import TrainConfig
from prl.errors import ConfigError

QUIET = ("httpx", "aiohttp.access", "asyncio")
"""Loggers that say something at every request: only their warnings are logged."""
RUN_FILES = ("config.yaml", "metrics.jsonl", "result.json")
"""A directory with one of these holds a run."""


class RunResult(msgspec.Struct):
    """The content of `result.json`."""

    status: str = "failed"
    """completed, failed, stopped or refused."""
    error: str | None = None
    ended_because: str | None = None
    """Why the run ended before `max_steps`; null where it did not."""
    steps: int = 0
    seconds: float = 0.0
    metrics: dict[str, float | None] = {}
    """The newest value of every metric."""


def refuse_existing(run_dir: Path) -> None:
    """Raise ConfigError for a directory that holds a run."""
    if any((run_dir / name).exists() for name in RUN_FILES):
        raise ConfigError(f"run.dir={str(run_dir)!r} already holds a run: choose another run.name, or remove it")


def new_run_dir(config: TrainConfig) -> Path:
    """Make the run directory and write the resolved config into it."""
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(plain(config)), run_dir / "config.yaml")
    if HydraConfig.initialized():  # what Hydra would have written before the directory was checked
        (run_dir / ".hydra").mkdir(exist_ok=True)
        OmegaConf.save(HydraConfig.get(), run_dir / ".hydra" / "hydra.yaml")
        OmegaConf.save(OmegaConf.create(list(HydraConfig.get().overrides.task)), run_dir / ".hydra" / "overrides.yaml")
    return run_dir


def hold(run_dir: Path) -> TextIO:
    """Mark the run as running until the returned file is closed or the process ends, however it ends.

    A lock on `config.yaml`; a file system without locks goes without the mark.
    """
    file = (run_dir / "config.yaml").open("r+")
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


class Terminal(logging.Handler):
    """Warnings on standard error, one line each: prl's and those of a user's modules. A library's are for the log."""

    WARNING = re.compile(r"(?P<file>.+?):\d+: \w+: (?P<text>.*?)(\n  .*)?\s*", re.DOTALL)
    """What `logging` makes of a warning of Python's."""
    LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    OWN = str(Path(__file__).parent) + os.sep

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self.addFilter(lambda record: self.said_by(record).startswith(self.OWN) or not self.of_library(record))

    def said_by(self, record: logging.LogRecord) -> str:
        """The file that the record is about."""
        found = self.WARNING.fullmatch(record.getMessage()) if record.name == "py.warnings" else None
        return found["file"] if found else record.pathname

    def of_library(self, record: logging.LogRecord) -> bool:
        return self.said_by(record).startswith(self.LIBRARIES)

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)  # the live table puts itself there

    def format(self, record: logging.LogRecord) -> str:
        if record.name == "py.warnings" and (found := self.WARNING.fullmatch(record.getMessage())):
            record = logging.makeLogRecord({**vars(record), "msg": found["text"], "args": ()})
        return super().format(record)


def hold_log() -> MemoryHandler:
    """Show warnings in the terminal from now on, and keep the log until `log_to` has a file for it."""
    memory = MemoryHandler(capacity=100_000, flushLevel=logging.CRITICAL + 1)
    logging.basicConfig(level=logging.INFO, handlers=[memory, Terminal()], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    return memory


def log_to(path: Path, memory: MemoryHandler) -> None:
    """Write this process's log to `path`, what was kept in `memory` first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    memory.setTarget(file)
    memory.flush()
    root = logging.getLogger()
    root.removeHandler(memory)
    root.addHandler(file)
