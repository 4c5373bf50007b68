"""One job of a sweep: skipped where it is finished, left alone where it runs, else run, and on record however it ends.

<sweep>/<job>/                     the job's run directory; `result.json` has its status
<sweep>/earlier/<job>.failed-1/    what an attempt left that did not complete, once the job is done again
<sweep>/.locks/<job>               locked by the process that runs the job; its id is in it
"""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from prl.command import INTERRUPTED
from prl.compose import to_config, typed
from prl.config.schema import TrainConfig
from prl.errors import ConfigError, PrlError
from prl.masking import masked
from prl.result import RunResult, read_result, write_result
from prl.resume import AUTO
from prl.run_dir import move_aside
from prl.run_yaml import yaml_of
from prl.signals import stopping
from prl.sweep.metric import optimized
from prl.sweep.naming import digest
from prl.text import as_message
from prl.wire import checkpoints
from prl.wire.files import open_lock, regular, write_atomically

EARLIER, LOCKS = "earlier", ".locks"
TURN_S = 7 * 24 * 3600.0
"""Deadline of a job that waits for another to be done with what they share, seconds."""


def run_job(cfg: DictConfig, main: Callable[[TrainConfig], RunResult]) -> float | None:
    """One job of a sweep, from Hydra's config of it.

    Returns:
        The optimised metric; None where the job did not complete or has no such metric. A sweeper counts that as a
        failed trial.

    Raises:
        SystemExit: It was stopped, and so is the sweep. Hydra counts other exceptions as a job that failed.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    cfg.run.dir, cfg.run.name = str(folder), folder.name
    with held(folder.parent / LOCKS / folder.name) as mine:
        if not mine:
            say(folder, "runs in another process: left alone")
            return None
        status = status_of(folder)
        if status == "completed":
            say(folder, "completed already: skipped")
            return record_metric(folder, cfg)
        if status is not None and cfg.run.resume == AUTO and checkpoints.steps_of(folder):
            say(folder, f"{status} before: goes on from its last checkpoint")
        elif status is not None:
            set_aside(folder, status)
        attempt(cfg, typed(hydra), folder, main)
        return record_metric(folder, cfg) if status_of(folder) == "completed" else None


def attempt(cfg: DictConfig, overrides: list[str], folder: Path, main: Callable[[TrainConfig], RunResult]) -> None:
    """Run the job; say and record how it ended. Raises SystemExit where it was stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with isolated(), turn(folder, cfg):
            main(to_config(cfg, overrides))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except (Exception, SystemExit) as error:  # none of prl's own ends a job so
        if not (folder / "result.json").exists():  # refused before it began
            known = isinstance(error, PrlError)
            write_result(
                folder,
                RunResult(
                    status="refused" if isinstance(error, ConfigError) else "failed",
                    error=str(error) if known else "".join(traceback.format_exception(error)),
                ),
            )
            overrides_file = folder / ".hydra" / "overrides.yaml"
            if not overrides_file.parent.is_symlink():  # why the job was refused
                write_atomically(overrides_file, OmegaConf.to_yaml(OmegaConf.create(masked(overrides))).encode())
        result = read_result(folder)
        first, _, more = str(error).strip().partition("\n")
        said = first if isinstance(error, PrlError) else f"{type(error).__name__}: {first}"
        where = f" ({folder}/result.json)" if more or said != first else ""
        say(folder, f"{'failed' if result is None else result.status}: {said}{where}")


def record_metric(folder: Path, cfg: DictConfig) -> float | None:
    """The optimised metric of a completed job, which is written to its `result.json`. None where it has none."""
    result = read_result(folder)
    assert result is not None
    try:
        value: float | None = optimized(folder, OmegaConf.to_object(cfg.optimized_metric))  # type: ignore[arg-type]
    except PrlError as error:
        say(folder, f"error: {error}")
        value = None
    if result.optimized_metric != value:
        result.optimized_metric = value
        write_result(folder, result)
    if value is not None:
        say(folder, f"{cfg.optimized_metric.key or 'reward'} {value:.4f}")
    return value


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Leave nothing of a job to the next one in this process.

    That is: its log files, which warnings it has shown, its environment, how it took signals.
    """
    environment, before = dict(os.environ), {number: signal.getsignal(number) for number in stopping()}
    for number in before.keys() - {signal.SIGINT}:  # submitit has its processes ignore SIGTERM
        signal.signal(number, signal.default_int_handler)
    with warnings.catch_warnings():  # leaving this also has warnings shown again
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root = logging.getLogger()
            for handler in list(root.handlers):
                root.removeHandler(handler)
                handler.close()
            os.environ.clear()
            os.environ.update(environment)
            for number, taken in before.items():
                signal.signal(number, taken)


def status_of(folder: Path) -> str | None:
    """completed, failed, stopped or refused; crashed where a process has left no result, None where nothing has run."""
    result = read_result(folder)
    if result is not None:
        return result.status
    return "crashed" if folder.is_dir() and any(folder.iterdir()) else None


def set_aside(folder: Path, status: str) -> Path:
    """Move what an attempt has left out of the way; returns where it is now."""
    earlier = folder.parent / EARLIER
    earlier.mkdir(exist_ok=True)
    moved = move_aside(folder, earlier)
    say(folder, f"{status} before: done again; what it left is now {moved}")
    return moved


@contextlib.contextmanager
def held(path: Path, *, mark: bool = True) -> Iterator[bool]:
    """Hold the lock at `path`, which ends with this process at the latest. False where another process has it.

    With `mark`, the file says who holds it; without, it stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks goes without
            pass
        if mark:
            file.truncate(0)
            file.write(f"{os.getpid()} {socket.gethostname()}\n")
            file.flush()
        yield True
        if mark:
            file.truncate(0)


@contextlib.contextmanager
def turn(folder: Path, cfg: DictConfig) -> Iterator[None]:
    """Wait until no other job of the sweep uses the engines, or the port, that this one names: one run at a time each.

    Raises PrlError at the deadline.
    """
    shared = sorted(cfg.inference.urls) or [cfg.inference.port]
    if shared == [None]:
        yield
        return
    path, deadline = folder.parent / LOCKS / f"engine-{digest(repr(shared))}", time.monotonic() + TURN_S
    waiting = False
    while True:
        with held(path) as mine:
            if mine:
                yield
                return
        if time.monotonic() > deadline:
            raise PrlError(f"{folder.name}: another job had {shared} for longer than {TURN_S:g} s")
        if not waiting:
            say(folder, f"waits for another job to be done with {shared}")
        waiting = True
        time.sleep(0.2)


def longest_grace_s(folder: Path) -> float:
    """The longest `checkpoint.grace_s` of the sweep's jobs, seconds; 0 of one whose config cannot be read."""
    longest = 0.0
    for path in folder.glob("*/config.yaml"):
        with contextlib.suppress(Exception):  # YAML's, OmegaConf's: one that was cut off keeps no job from being asked
            config = yaml_of(regular(path).read_text(encoding="utf-8"))
            longest = max(longest, float(config["checkpoint"]["grace_s"] or 0))
    return longest


def say(folder: Path, text: str) -> None:
    """A line about a job, for the person who watches the sweep."""
    print(as_message(f"job {folder.name}: {text}"), file=sys.stderr, flush=True)
