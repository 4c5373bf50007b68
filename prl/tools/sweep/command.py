"""The command of a sweep, around Hydra: one directory, a record of what was asked for, and a summary at the end."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from prl.base.errors import ConfigError
from prl.base.files import read_json, write_atomically
from prl.base.masking import masked
from prl.base.text import as_message, natural, safe
from prl.config.schema import AUTO
from prl.launch import command
from prl.launch.cluster import connect
from prl.runs.result import RunResult
from prl.runs.run_dir import refuse_existing
from prl.tools import line_of
from prl.tools.sweep import job, naming

RECORD = "sweep.json"
LAST_LINES_S = 1.0
"""[s] Time for what jobs on a cluster have printed last to get here."""
NO_JOBS = {job.EARLIER, "engines"}
"""Folders of a sweep's directory that are no job's."""


class SweepRecord(msgspec.Struct):
    """The content of `sweep.json`."""

    varied: list[str]
    """Config keys that differ between the jobs."""
    fixed: dict[str, str]
    """The overrides that all jobs have."""


def read_record(folder: Path) -> SweepRecord | None:
    """The record of the sweep in `folder`, None where there is none."""
    return read_json(folder / RECORD, SweepRecord) if (folder / RECORD).exists() else None


def run(task: Callable[[], Any], arguments: list[str]) -> None:
    """Run the one job that `arguments` ask for, or, where they or their experiment ask for a sweep, each of its jobs.

    Raises:
        SystemExit: With 0 where the job, or each of the sweep's directory, has completed, 130 where it was stopped.
    """
    status: Any = 0
    try:
        command.run(task, arguments, "train")
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:
        status = command.INTERRUPTED
    finally:
        Recorder.left.close()
    refused = status == command.REFUSED and not (Recorder.folder and jobs(Recorder.folder))
    if Recorder.folder is None or refused:  # why it was refused has been printed
        raise SystemExit(status)
    print(f"sweep: {Recorder.folder}", *summary(Recorder.folder), sep="\n", file=sys.stderr, flush=True)
    if not status and any(job.status_of(path) != "completed" for path in jobs(Recorder.folder)):
        status = command.FAILED
    # Whoever stops a sweep does not wait for its page.
    if status != command.INTERRUPTED:
        write_report(Recorder.folder)
    raise SystemExit(status)


class Recorder(Callback):
    """Refuses what a sweep cannot do, and writes its record, once its config has composed and before its first job."""

    folder: ClassVar[Path | None] = None
    """The directory of this process's sweep, None where it does one run."""
    left: ClassVar[contextlib.ExitStack] = contextlib.ExitStack()
    """Things that go at the sweep's end, whatever that is."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        try:
            if "study_name" in config.hydra.sweeper:  # an option of Optuna's alone
                from prl.tools.sweep import search  # Optuna, which not all have

                search.install()
            if "ray" in config.hydra.launcher:
                options: Any = OmegaConf.to_container(config.hydra.launcher.ray.init, resolve=True)
                connect(options, "sweep=ray")
                Recorder.left.callback(leave_ray)
            folder = naming.folder_of(config)
            begin(config, folder)
            Recorder.folder = folder
        except (ConfigError, OSError) as error:  # of which Hydra would warn, and run jobs that no record knows of
            print(f"error: {as_message(str(error))}", file=sys.stderr, flush=True)
            raise SystemExit(command.REFUSED) from None


def leave_ray() -> None:
    """Disconnect from Ray, once what jobs have printed last has had time to get here."""
    import ray

    time.sleep(LAST_LINES_S)
    ray.shutdown()


def begin(config: DictConfig, folder: Path) -> None:
    """Record in its directory the sweep that `config` asks for; give its jobs the directory and their names.

    Raises ConfigError for what a sweep cannot do.
    """
    record, fixed_keys = checked(config, folder)
    write_atomically(folder / RECORD, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    folder = folder.absolute()  # a process of Ray's begins elsewhere
    config.hydra.sweep.dir = str(folder)  # the sweeper's; a job composes its config from Hydra's overrides
    excluded = ",".join(f"'{key}'" for key in fixed_keys)
    config.hydra.overrides.hydra += [f"hydra.sweep.dir='{folder}'", f"{naming.CARRIER}=[{excluded}]"]
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)


def checked(config: DictConfig, folder: Path) -> tuple[SweepRecord, tuple[str, ...]]:
    """The record of the sweep that `config` asks for, and its keys that do not vary.

    Raises ConfigError.
    """
    hydra = config.hydra
    # Optuna's is an enum; other sweepers have a text, or none.
    direction = getattr(hydra.sweeper.get("direction"), "name", hydra.sweeper.get("direction"))
    if direction not in (None, config.optimized_metric.direction):
        raise ConfigError(
            f"hydra.sweeper.direction={direction}, but optimized_metric.direction={config.optimized_metric.direction}: "
            "begin with sweep=optuna, which takes it from there"
        )
    if config.dry_run:
        raise ConfigError("dry_run=true is of one run: give one of the sweep's jobs, without -m")
    if config.run.resume not in (None, AUTO):
        raise ConfigError("run.resume=<run> goes on with one run; the jobs of a sweep go on with run.resume=auto")
    refuse_existing(folder)
    before = read_record(folder)
    arguments = naming.apart(naming.overrides_of(hydra), () if before is None else tuple(before.varied))
    record = SweepRecord(list(arguments.varied), masked(arguments.fixed))
    if before is not None and any(job.status_of(path) == "completed" for path in jobs(folder)):
        for what, then, now in (("varies", before.varied, record.varied), ("sets", before.fixed, record.fixed)):
            if then != now:
                raise ConfigError(f"{folder} holds a sweep that {what} {then}, not {now}: choose another run.name")
    return record, arguments.keys


def jobs(folder: Path) -> list[Path]:
    """The folders of the jobs that a sweep has begun, by name and by the numbers in it."""
    paths = [path for path in folder.glob("[!.]*") if path.is_dir() and path.name not in NO_JOBS]
    return sorted(paths, key=lambda path: natural(path.name))


def summary(folder: Path) -> list[str]:
    """A table of the sweep's jobs: status, optimised metric, seconds; then the errors, a line each."""
    rows, errors = [["job", "status", "metric", "seconds"]], []
    for path in jobs(folder):
        result = job.result_of(path) or RunResult()
        metric = "" if result.optimized_metric is None else f"{result.optimized_metric:.4f}"
        rows.append([path.name, job.status_of(path) or "not started", metric, f"{result.seconds:.0f}"])
        if result.error:
            errors.append(safe(f"{path.name}: {line_of(result.error)}"))
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(size) for cell, size in zip(row, width, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells] + errors


def write_report(folder: Path) -> None:
    """Write the summary of the sweep (`prl report`) once its last job has ended; say where, or why there is none."""
    from prl.tools.report.sweep import write_summary  # pandas and matplotlib take their time

    try:
        found = write_summary(folder).comparison
        print(f"{safe(found.metric)}:", *map(safe, found.verdict), sep="\n- ", file=sys.stderr)
        print(f"look at: {folder / 'summary.html'}", file=sys.stderr, flush=True)
    except Exception as error:  # the jobs and their states are what a sweep is for
        print(f"no summary: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
