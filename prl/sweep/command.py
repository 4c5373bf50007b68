"""The command of a sweep, around Hydra: one directory, a record of what was asked for, and a summary at the end."""

import contextlib
import copyreg
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict

from prl import command, compose
from prl.config.machine import check_run_dir
from prl.config.targets import spec_of
from prl.errors import UNREADABLE, ConfigError
from prl.masking import masked
from prl.result import read_result
from prl.resume import AUTO
from prl.run_dir import refuse_existing
from prl.signals import stopping
from prl.sweep import gpus, job, jobs, naming
from prl.text import as_message, safe
from prl.wire.files import regular, write_atomically

RECORD = "sweep.json"
ASK_AGAIN_S = 10.0
STOP_S = 30.0
"""Deadline for jobs in other processes to stop in order, after the grace for their last checkpoints, seconds."""


class SweepRecord(msgspec.Struct):
    """The content of `sweep.json`."""

    varied: list[str]
    """Config keys that differ between the jobs."""
    fixed: dict[str, str]
    """The overrides that all jobs have."""
    commands: list[dict[str, Any]] = []
    """The arguments of every command that worked on this sweep, and when."""


def own_store() -> ConfigStore:
    """Hydra's store of configs as this process makes it: `prl.compose` has registered prl's as it was imported."""
    Plugins.instance()  # they store theirs when they are found
    return ConfigStore.instance()


# What the command hands to a worker process brings no schemas along: those made at run time would be copies there, with
# fields that have another `dataclasses.MISSING`.
copyreg.pickle(ConfigStore, lambda _: (own_store, ()))


def read_record(folder: Path) -> SweepRecord | None:
    """The record of the sweep in `folder`, None where there is none."""
    try:
        return msgspec.json.decode(regular(folder / RECORD).read_bytes(), type=SweepRecord)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(
            f"{folder / RECORD} is damaged ({error}): choose another hydra.sweep.dir, or remove it"
        ) from error


def run(task: Callable[[], Any], arguments: list[str]) -> None:
    """Run a sweep to its end and say how its jobs ended.

    Raises:
        SystemExit: With 0 where every job of the sweep's directory has completed, 130 where it was stopped.
    """
    folder, arguments = prepared(arguments)
    files = {path: path.read_bytes() if path.exists() else None for path in (folder / RECORD, folder / "multirun.yaml")}
    begun = begun_at(folder)
    interrupts: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        interrupts.append(number)
        if number != signal.SIGHUP or interrupts.count(number) == 1:  # a terminal and its shell send one each
            raise KeyboardInterrupt

    for number in stopping():
        signal.signal(number, interrupt)
    status: Any = 0
    try:
        command.run(task, arguments, "train")
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:
        status = command.INTERRUPTED
    finally:
        if interrupts:  # whatever a launcher has made of it
            status = command.INTERRUPTED
        if status == command.INTERRUPTED:
            stop_jobs(folder, job.longest_grace_s(folder))
    stopped = status == command.INTERRUPTED
    if begun_at(folder) == begun and not (stopped and begun):  # no job ran; why not has been said
        put_back(files)
        if stopped:
            print("stopped", file=sys.stderr, flush=True)
        raise SystemExit(status)
    try:
        print(f"sweep: {folder}", *summary(folder), sep="\n", file=sys.stderr, flush=True)
        if not status and not all(state == "completed" for state in states(folder).values()):
            status = command.FAILED
        if not stopped:
            write_report(folder)
    except KeyboardInterrupt:
        print(f"stopped: no summary; prl report {folder} writes it", file=sys.stderr, flush=True)
        status = command.INTERRUPTED
    raise SystemExit(status)


def begun_at(folder: Path) -> dict[str, int]:
    """When a job, by name, was last begun, nanoseconds: its lock is written then."""
    return {path.name: path.stat().st_mtime_ns for path in (folder / job.LOCKS).glob("*")}


def put_back(files: dict[Path, bytes | None]) -> None:
    """Make the files of a sweep what they were, None where there was none; a directory with nothing else goes."""
    for path, content in files.items():
        if content is None:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        elif path.read_bytes() != content:
            write_atomically(path, content)


def prepared(arguments: list[str]) -> tuple[Path, list[str]]:
    """The sweep's directory, and the arguments for Hydra, with that and the keys that name no job among them."""
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    try:
        folder = naming.folder_of(overrides)
        record = read_record(folder)
        own = [override for override in overrides if not override.startswith("hydra")]
        keys = naming.apart(own, () if record is None else tuple(record.varied)).keys
    except Exception:  # Hydra says what is wrong with an override
        return Path("outputs"), arguments
    excluded = ",".join(f"'{key}'" for key in keys)
    added = [f"hydra.sweep.dir='{folder}'", f"{naming.CARRIER}=[{excluded}]"]
    place = arguments.index(overrides[0]) if overrides else len(arguments)  # Hydra wants overrides in one stretch
    return folder, [*arguments[:place], *added, *arguments[place:]]


class Recorder(Callback):
    """Refuses what a sweep cannot do, and writes its record, once its config has composed and before its first job."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        try:
            folder = Path(config.hydra.sweep.dir)
            record = checked(config, folder)
            jobs.dry_run_instead(config, folder, record.varied)
            given = [arg for arg in sys.argv[1:] if not arg.startswith(("hydra.sweep.dir='", naming.CARRIER))]
            record.commands += [{"arguments": masked(given), "started": datetime.now().isoformat(timespec="seconds")}]
            write_atomically(folder / RECORD, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
            spare_jobs_of_interrupts(config.hydra.launcher)
            gpus.ask_for_gpus(config)
        except ConfigError as error:
            print(f"error: {as_message(str(error))}", file=sys.stderr, flush=True)
            raise SystemExit(command.REFUSED) from None
        except Exception as error:  # Hydra would warn and run jobs that no record knows of
            reason = as_message(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            print(f"error: no {RECORD} can be written, so no job is run: {reason}", file=sys.stderr, flush=True)
            raise SystemExit(command.FAILED) from None


def spare_jobs_of_interrupts(launcher: DictConfig) -> None:
    """Have Ctrl-C in a terminal reach the jobs of submitit on this machine by `stop_jobs` alone.

    submitit starts them in the terminal's process group, under a process that kills its job a second after SIGINT.
    """
    if launcher._target_.endswith("submitit_launcher.LocalLauncher"):
        with open_dict(launcher):  # its schema lacks what the launcher takes
            launcher.setup = ["trap '' INT"]


def checked(config: DictConfig, folder: Path) -> SweepRecord:
    """The record of the sweep that `config` asks for, with the commands before. Raises ConfigError."""
    hydra = config.hydra
    for kind in ("launcher", "sweeper"):
        package, module = str(hydra[kind]._target_).split(".")[:2]
        if package == "hydra_plugins" and spec_of(f"{package}.{module}") is None:
            raise ConfigError(
                f"hydra/{kind}={hydra.runtime.choices[f'hydra/{kind}']} needs the package {module}, which is not "
                "installed: pip install 'prl[sweep]'"
            )
    direction = getattr(hydra.sweeper.get("direction"), "name", hydra.sweeper.get("direction"))
    if direction not in (None, config.optimized_metric.direction):
        raise ConfigError(
            f"hydra.sweeper.direction={direction}, but optimized_metric.direction={config.optimized_metric.direction}: "
            "begin with sweep=optuna, which takes it from there"
        )
    if config.sweep.share_engine and "submitit" in hydra.launcher._target_:
        raise ConfigError(
            "sweep.share_engine=true: a job of submitit has a process of its own, and its engine with it. Leave it "
            "out, or take another launcher"
        )
    if config.run.resume not in (None, AUTO):
        raise ConfigError(
            "run.resume=<run> goes on with one run: leave out -m and what it varies; the jobs of a sweep go on with "
            "run.resume=auto"
        )
    check_run_dir(str(folder), "hydra.sweep.dir")
    refuse_existing(folder)
    before = read_record(folder)
    found = naming.apart(compose.typed(hydra), () if before is None else tuple(before.varied))
    record = SweepRecord(list(found.varied), masked(found.fixed))
    if before is None or "completed" not in states(folder).values():  # nothing there that could be mistaken
        return SweepRecord(record.varied, record.fixed, [] if before is None else before.commands)
    for what, then, now in (("varies", before.varied, record.varied), ("sets", before.fixed, record.fixed)):
        if then != now:
            raise ConfigError(f"{folder} holds a sweep that {what} {then}, not {now}: choose another run.name")
    record.commands = before.commands
    return record


def states(folder: Path) -> dict[str, str]:
    """The status of every job in the sweep's directory, by name."""
    names = sorted(path.name for path in (folder / job.LOCKS).glob("*") if not path.name.startswith("engine-"))
    found = {}
    for name in names:
        with job.held(folder / job.LOCKS / name, mark=False) as mine:
            found[name] = (job.status_of(folder / name) or "not started") if mine else "running"
    return found


def summary(folder: Path) -> list[str]:
    """A table of the sweep's jobs: status, optimised metric, seconds; then the errors, a line each."""
    rows, errors = [("job", "status", "metric", "seconds")], []
    for name, status in states(folder).items():
        result = read_result(folder / name)
        metric = None if result is None else result.optimized_metric
        seconds = "" if result is None else f"{result.seconds:.0f}"
        rows.append((name, status, "" if metric is None else f"{metric:.4f}", seconds))
        if result is not None and result.error:
            line = result.error.strip().splitlines()[-1 if "Traceback" in result.error else 0]
            errors.append(safe(f"{name}: {line}"))
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(size) for cell, size in zip(row, width, strict=True)).rstrip() for row in rows
    ] + errors


def stop_jobs(folder: Path, grace_s: float) -> None:
    """Stop the sweep's jobs in other processes of this machine, and wait for them; then end what is left of them.

    Another interrupt ends them at once.
    """
    deadline = time.monotonic() + STOP_S + grace_s
    asked: dict[int, float] = {}
    try:
        while (pids := holders(folder)) and (now := time.monotonic()) < deadline:
            for pid in pids:
                if now - asked.get(pid, -ASK_AGAIN_S) >= ASK_AGAIN_S:  # one that has just begun may not have heard
                    asked[pid] = now
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            time.sleep(0.1)
    except KeyboardInterrupt:
        pass
    for pid in holders(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def holders(folder: Path) -> list[int]:
    """Ids of the processes, other than this one, that run a job of the sweep on this machine."""
    found = []
    for path in (folder / job.LOCKS).glob("*"):
        with job.held(path, mark=False) as mine:
            pid, _, host = ("" if mine else path.read_text(encoding="utf-8").strip()).partition(" ")
        if pid and host == os.uname().nodename and int(pid) != os.getpid():
            found.append(int(pid))
    return found


def write_report(folder: Path) -> None:
    """Write the summary of the sweep (`prl report`) once its last job has ended; say where, or why there is none."""
    from prl.report.sweep import write_summary  # pandas and matplotlib take their time

    try:
        write_summary(folder)
        print(f"look at: {folder / 'summary.html'}", file=sys.stderr, flush=True)
    except Exception as error:  # the jobs and their states are what a sweep is for
        print(f"no summary: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
