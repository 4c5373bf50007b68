"""One job of a sweep: skipped where it has completed, left alone where it runs, else run, and recorded as it ends.

<sweep>/<job>/                     the job's run directory; `result.json` has its status
<sweep>/earlier/<job>.failed-1/    what an attempt left that did not complete, once the job is done again
"""

import contextlib
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from prl.base import checkpoint_folders
from prl.base.errors import ConfigError, PrlError
from prl.base.files import write_atomically
from prl.base.masking import masked
from prl.base.text import as_message
from prl.config.build import plain, read
from prl.config.compose import to_config, typed
from prl.config.schema import AUTO, OptimizedMetricConfig, TrainConfig
from prl.launch.command import INTERRUPTED
from prl.runs.owner import is_owned
from prl.runs.result import RunResult, read_result, write_result
from prl.runs.run_dir import move_aside
from prl.tools.sweep.metric import check_objective, optimized

EARLIER = "earlier"


def run_job(cfg: DictConfig, main: Callable[..., RunResult]) -> float | None:
    """One job of a sweep, from Hydra's config of it.

    Returns:
        The optimised metric; None where the job did not complete or has no such metric. A sweeper counts that as a
        failed trial.

    Raises:
        SystemExit: It was stopped, and so is the sweep. Hydra counts other exceptions as a job that failed.
    """
    hydra = HydraConfig.get()
    os.chdir(hydra.runtime.cwd)  # a process of Ray's begins elsewhere
    folder = Path(hydra.runtime.output_dir)
    cfg.run.dir, cfg.run.name = str(folder), folder.name
    status = status_of(folder)
    if status == "running":
        say(folder, "runs in another process: left alone")
        return None
    if status == "completed":
        say(folder, "completed already: skipped")
        return record_metric(folder, cfg)
    if status is not None and cfg.run.resume == AUTO and checkpoint_folders.steps_of(folder):
        say(folder, f"{status} before: goes on from its last checkpoint")
    elif status is not None:
        earlier = folder.parent / EARLIER
        earlier.mkdir(exist_ok=True)
        moved = move_aside(folder, earlier)
        say(folder, f"{status} before: done again; what it left is now {moved}")
    attempt(cfg, typed(hydra), folder, main)
    return record_metric(folder, cfg) if status_of(folder) == "completed" else None


def follow_one_another() -> bool:
    """Return whether this process does several jobs of the sweep, one after another: one of Ray or Slurm does one."""
    return HydraConfig.get().runtime.choices["hydra/launcher"] in ("basic", "joblib")


def attempt(cfg: DictConfig, overrides: list[str], folder: Path, main: Callable[..., RunResult]) -> None:
    """Run the job; say and record how it ended. Raises SystemExit where it was stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with isolated():
            if "direction" in HydraConfig.get().sweeper:  # a search: without an objective the job is of no use to it
                check_objective(objective_of(cfg), plain(cfg))
            main(to_config(TrainConfig, cfg, overrides), in_series=follow_one_another())
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except (Exception, SystemExit) as error:  # none of prl's own ends a job so
        if not (folder / "result.json").exists():  # refused before it began
            known = isinstance(error, PrlError)
            text = str(error) if known else "".join(traceback.format_exception(error))
            write_result(folder, RunResult("refused" if isinstance(error, ConfigError) else "failed", text))
            typed_overrides = OmegaConf.to_yaml(OmegaConf.create(masked(overrides)))
            write_atomically(folder / ".hydra" / "overrides.yaml", typed_overrides.encode())
        result = result_of(folder)
        line = str(error).strip().partition("\n")[0]
        message = line if isinstance(error, PrlError) else f"{type(error).__name__}: {line}"
        say(folder, f"{'failed' if result is None else result.status}: {message} ({folder}/result.json)")


def result_of(folder: Path) -> RunResult | None:
    """The job's result; None where it has left none that can be read."""
    with contextlib.suppress(ConfigError):
        return read_result(folder)
    return None


def record_metric(folder: Path, cfg: DictConfig) -> float | None:
    """The optimised metric of a completed job, which is written to its `result.json`. None where it has none."""
    result = result_of(folder)
    assert result is not None
    try:
        value = optimized(folder, objective_of(cfg), plain(cfg))
    except PrlError as error:
        say(folder, f"error: {error}")
        value = None
    if result.optimized_metric != value:
        result.optimized_metric = value
        write_result(folder, result)
    if value is not None:
        say(folder, f"{cfg.optimized_metric.key or 'reward'} {value:.4f}")
    return value


def objective_of(cfg: DictConfig) -> OptimizedMetricConfig:
    """The options of the objective."""
    return read(OptimizedMetricConfig, plain(cfg.optimized_metric), "optimized_metric")


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Leave nothing of a job to the next one in this process: log files, warnings shown, environment, signals."""
    environment = dict(os.environ)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a launcher may have its processes ignore it
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
            for number, handling in before.items():
                signal.signal(number, handling)


def status_of(folder: Path) -> str | None:
    """completed, failed, stopped, refused, running; crashed where a process left no result, None where none ran."""
    if is_owned(folder):
        return "running"
    result = result_of(folder)
    if result is not None:
        return result.status
    return "crashed" if folder.is_dir() and any(path.name != ".hydra" for path in folder.iterdir()) else None


def say(folder: Path, text: str) -> None:
    """A line about a job, for the person who watches the sweep."""
    print(as_message(f"job {folder.name}: {text}"), file=sys.stderr, flush=True)
