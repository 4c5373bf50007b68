"""The run directory: refuse one that holds a run, write what a run begins and ends with."""

import contextlib
import os
import re
import shutil
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from prl.base.errors import UNREADABLE, ConfigError, NoSignal, PrlError, of_disk, of_own_code
from prl.base.files import content_of, naming, read_json, write_atomically
from prl.base.masking import masked
from prl.config.run_yaml import has_config
from prl.rollouts.pictures import FOLDER
from prl.runs.owner import LOCK
from prl.runs.result import RunResult, write_result

RUN_FILES = ("config.yaml", "metrics.jsonl", "result.json")
"""A directory with one of these holds a run."""
FILES = (*RUN_FILES, "provenance.json", "provenance.diff", "resumes.jsonl")
"""The files of a run directory, but for its lock and the pages."""
PAGES = ("report.html", "trace.json")
STEP = re.compile(r"step_(\d{6,})")
ROLLOUTS = re.compile(r"(eval_.+_)?step_(\d{6,})\.jsonl")
"""Name of a rollout file: of a step, or of an evaluation."""
NOT_OF_A_RUN = ("run.", "sweep.", "optimized_metric.", "engine.urls", "hydra")
"""Beginnings of config keys that change no result: a sweep whose command has others still finds its jobs, and a
summary does not tell runs apart by them."""


class Best(msgspec.Struct):
    """The fields that are read of `checkpoints/best/best.json`."""

    step: int


def refuse_existing(run_dir: Path) -> None:
    """Raise ConfigError for a directory that holds a run."""
    if holds_run(run_dir):
        raise _taken(run_dir)


def refuse_other_files(run_dir: Path) -> None:
    """Raise ConfigError for a directory that cannot be made or written to, or has files and has had no run."""
    # The directory may not be there yet: then the folder decides in which it would be made.
    nearest = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir={str(run_dir)!r} cannot be made: {nearest} is no directory that can be written to")
    names = sorted(path.name for path in run_dir.iterdir()) if run_dir.is_dir() else []
    # Logs, with pictures or without, are of an engine whose run was killed before it began.
    if names and names not in (["logs"], ["logs", FOLDER]) and not {LOCK, *RUN_FILES} & set(names):
        raise ConfigError(
            f"run.dir={str(run_dir)!r} holds other files ({', '.join(names[:3])}{', …' * (len(names) > 3)}): name a "
            "directory that is new or empty"
        )


def holds_run(run_dir: Path) -> bool:
    return any((run_dir / name).exists() for name in RUN_FILES)


def move_aside(run_dir: Path, into: Path) -> Path:
    """Move a run's directory into the folder `into`, as the next `<name>.failed-<n>` there; returns where it is now."""
    number = 1
    while (moved := into / f"{run_dir.name}.failed-{number}").exists():
        number += 1
    return run_dir.rename(moved)


def _taken(run_dir: Path) -> ConfigError:
    return ConfigError(
        f"run.dir={str(run_dir)!r} already holds a run: choose another run.name, remove it, or go on with it "
        f"(run.resume={run_dir if has_config(run_dir) else 'auto'})"
    )


def new_run_dir(run_dir: Path, config: str) -> None:
    """Make the run directory, for its owner alone to read, and write the resolved `config` (YAML) into it.

    Raises ConfigError where another run has the directory, also where that began at the same moment, or other files are
    in it.
    """
    refuse_other_files(run_dir)
    path = run_dir / "config.yaml"
    with naming(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        run_dir.chmod(0o700)
        try:
            path.open("x").close()  # of two at once, one gets to create it
        except FileExistsError:
            raise _taken(run_dir) from None
    write_config(run_dir, config)


def remove_early(run_dir: Path, absent: Iterable[Path]) -> None:
    """Remove logs and pictures of a run that was refused, and what was made for them of the folders `absent` before."""
    absent = list(absent)
    if not holds_run(run_dir) and not (run_dir / LOCK).exists():
        if run_dir / FOLDER in absent:
            shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
        with contextlib.suppress(OSError):
            for process in ("engine", "trainer"):
                for log in (run_dir / "logs").glob(f"{process}*.log"):
                    log.unlink()
            (run_dir / "logs").rmdir()
        for folder in dict.fromkeys((run_dir, *absent)):
            with contextlib.suppress(OSError):
                folder.rmdir()


def write_config(run_dir: Path, config: str) -> None:
    """Write the resolved config (YAML) and what was typed for it."""
    write_atomically(run_dir / "config.yaml", config.encode(), durable=True)
    if HydraConfig.initialized():  # what Hydra would have written before the directory was checked
        with naming(run_dir / ".hydra"):
            (run_dir / ".hydra").mkdir(exist_ok=True)
            hydra = OmegaConf.create(masked(OmegaConf.to_container(HydraConfig.get(), enum_to_str=True)))
            OmegaConf.save(hydra, run_dir / ".hydra" / "hydra.yaml")
            OmegaConf.save(hydra.overrides.task, run_dir / ".hydra" / "overrides.yaml")


# --- what is in it ----------------------------------------------------------------------------------------------------


def clear(run_dir: Path) -> None:
    """Remove all that a run has left, where it begins again in its directory; the config, which says so, last."""
    others = ("rollouts", "tokens", "batches", "weights", "checkpoints", "events", ".hydra", *PAGES)
    for name in (*FILES[1:], *others, FILES[0]):
        _remove(run_dir / name)


def cut_back(run_dir: Path, step: int, *, first_line: int, evaluated: int) -> set[int]:
    """Remove what came after the checkpoint of `step`. Returns the steps whose metrics lines are kept.

    Args:
        run_dir: The run directory.
        step: The last step that is kept.
        first_line: The first step whose metrics line is to be written again.
        evaluated: The last version whose evaluation is kept.

    Raises:
        ConfigError: The record of the best version is damaged; nothing has been removed then.
    """
    # Read before anything is removed: a damaged record must not leave a run that is half cut back.
    best = run_dir / "checkpoints" / "best"
    best_step = read_json(best / "best.json", Best).step if (best / "best.json").exists() else 0
    metrics = run_dir / "metrics.jsonl"
    kept = dict(_lines_before(content_of(metrics), first_line))
    if metrics.exists():
        write_atomically(metrics, b"".join(kept.values()), durable=True)
    for path in filter(Path.is_file, (run_dir / "events").glob("[!.]*.jsonl")):
        write_atomically(path, b"".join(line for _, line in _lines_before(content_of(path), step + 1)), durable=True)
    for path in (run_dir / "rollouts").glob("*.jsonl"):
        if (match := ROLLOUTS.fullmatch(path.name)) and int(match[2]) > (evaluated if match[1] else step):
            _remove(path)
    for folder in ("tokens", "batches", "checkpoints"):
        for path in (run_dir / folder).glob("step_*"):
            if (match := STEP.fullmatch(path.name)) and int(match[1]) > step:
                _remove(path)
    for path in (run_dir / "checkpoints").glob(".step_*"):  # unfinished
        _remove(path)
    if best_step > evaluated:
        _remove(best)  # it is found again
    for name in ("weights", "batches/end.json", "result.json"):
        _remove(run_dir / name)
    return set(kept)


def last_metrics(run_dir: Path) -> dict[str, float]:
    """The newest value of every metric in `metrics.jsonl`."""
    results: dict[str, float] = {}
    for line in content_of(run_dir / "metrics.jsonl").splitlines():
        results |= msgspec.json.decode(line)
    return results


def _lines_before(data: bytes, step: int) -> Iterator[tuple[int, bytes]]:
    """The JSON lines of steps before `step`, by their steps; what cannot be read is left out."""
    for line in data.splitlines(keepends=True):
        with contextlib.suppress(*UNREADABLE, KeyError, TypeError):
            of_line = int(msgspec.json.decode(line)["step"])
            if line.endswith(b"\n") and of_line < step:
                yield of_line, line


def _remove(path: Path) -> None:
    with naming(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# --- its result ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded(run_dir: Path, result: RunResult, began: float) -> Iterator[None]:
    """Write `result.json` when the work inside has ended, however it ended: status, error and seconds are filled in.

    The seconds are those since the command `began` (`time.monotonic`). Raises PrlError where code called `sys.exit`.
    """
    try:
        yield
        result.status = "completed"
    except KeyboardInterrupt:
        result.status, result.error = "stopped", "interrupted"
        raise
    except SystemExit as error:  # code that nothing here has called by its name, a transport's
        result.error = f"the run was ended from within: {of_own_code(error)}"
        raise PrlError(result.error) from error
    except BaseException as error:
        # An error of prl's own says it all. Of any other the traceback is what one needs afterwards.
        whole = "".join(traceback.format_exception(error))
        result.error = str(error) if isinstance(error, PrlError) else of_disk(error) or whole
        result.reward_without_signal = error.reward if isinstance(error, NoSignal) else None
        raise
    finally:
        result.seconds = round(time.monotonic() - began, 3)
        if run_dir.is_dir():  # else somebody has removed it
            write_result(run_dir, result)
