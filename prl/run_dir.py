"""The run directory: refuse one that holds a run, write what a run begins and ends with."""

import asyncio
import contextlib
import fcntl
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from prl.config.evaluation import EvaluationConfig
from prl.config.instantiate import plain
from prl.config.schema import TrainConfig
from prl.errors import ConfigError, PrlError
from prl.wire.files import write_atomically

RUN_FILES = ("config.yaml", "metrics.jsonl", "result.json")
"""A directory with one of these holds a run."""
NOT_OF_A_RUN = ("run.", "sweep.", "optimized_metric.", "inference.urls", "hydra")
"""How the config keys begin that change no result: a sweep whose command has others still finds its jobs, and a summary
does not tell runs apart by them."""


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
        raise _taken(run_dir)


def set_aside(run_dir: Path) -> Path | None:
    """Move a directory out of the way whose run ended before its first step; returns where it is now, else None."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        result = msgspec.json.decode((run_dir / "result.json").read_bytes(), type=RunResult)
        if result.status == "completed" or result.steps or result.metrics or list(run_dir.glob("checkpoints/step_*")):
            return None
        number = 1
        while (moved := run_dir.with_name(f"{run_dir.name}.failed-{number}")).exists():
            number += 1
        run_dir.rename(moved)
        return moved
    return None


def _taken(run_dir: Path) -> ConfigError:
    return ConfigError(f"run.dir={str(run_dir)!r} already holds a run: choose another run.name, or remove it")


def new_run_dir(config: TrainConfig | EvaluationConfig) -> Path:
    """Make the run directory, for its owner alone to read, and write the resolved config into it.

    Raises ConfigError where another run has the directory, also where that began at the same moment.
    """
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        with (run_dir / "config.yaml").open("x") as file:  # of two at once, one gets to create it
            run_dir.chmod(0o700)  # Hydra may have made it
            OmegaConf.save(OmegaConf.create(plain(config)), file)
    except FileExistsError:
        raise _taken(run_dir) from None
    if HydraConfig.initialized():  # what Hydra would have written before the directory was checked
        (run_dir / ".hydra").mkdir(exist_ok=True)
        OmegaConf.save(HydraConfig.get(), run_dir / ".hydra" / "hydra.yaml")
        OmegaConf.save(HydraConfig.get().overrides.task, run_dir / ".hydra" / "overrides.yaml")
    return run_dir


def hold(run_dir: Path) -> TextIO:
    """Mark the run as running until the returned file is closed or the process ends, however it ends.

    A lock on `config.yaml`; a file system without locks goes without the mark.
    """
    file = (run_dir / "config.yaml").open("r+")
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


@contextlib.contextmanager
def recorded(run_dir: Path, result: RunResult) -> Iterator[None]:
    """Write `result.json` when the work inside has ended, however it ended: status, error and seconds are filled in.

    Raises KeyboardInterrupt where it was stopped.
    """
    started, held = time.monotonic(), hold(run_dir)
    try:
        yield
        result.status = "completed"
    except (KeyboardInterrupt, asyncio.CancelledError):
        result.status, result.error = "stopped", "interrupted"
        raise KeyboardInterrupt from None
    except BaseException as error:
        result.error = str(error) if isinstance(error, PrlError) else "".join(traceback.format_exception(error))
        raise
    finally:
        result.seconds = round(time.monotonic() - started, 3)
        write_atomically(run_dir / "result.json", msgspec.json.format(msgspec.json.encode(result)) + b"\n")
        held.close()
