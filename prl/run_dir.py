"""The run directory: refuse one that holds a run, write what a run begins and ends with."""

import contextlib
import fcntl
import logging.config
from pathlib import Path
from typing import TextIO

import msgspec
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from prl.config.instantiate import plain
from prl.config.schema import TrainConfig
from prl.errors import ConfigError

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
    optimized_metric: float | None = None
    """What a sweep compares its jobs by; null where the run is no job of one, or has no such metric."""


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


def log_to(path: Path) -> None:
    """Send this process's log to `path`, and its warnings to the terminal as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "file": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
                "terminal": {"format": "%(levelname)s: %(message)s"},
            },
            "handlers": {
                "file": {"class": "logging.FileHandler", "filename": path, "formatter": "file"},
                "terminal": {"class": "logging.StreamHandler", "level": "WARNING", "formatter": "terminal"},
            },
            "root": {"level": "INFO", "handlers": ["file", "terminal"]},
            "loggers": {name: {"level": "WARNING"} for name in ("httpx", "aiohttp.access", "asyncio")},
        }
    )
    logging.captureWarnings(True)
