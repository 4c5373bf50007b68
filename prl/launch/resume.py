"""Go on with a run: `prl train run.resume=<run or checkpoint>`, or `run.resume=auto` for a scheduler that starts again.

`run.fork=<run or checkpoint>` begins a new run with a copy of a checkpoint, from which that goes on like any other.

Files of the run directory are cut back to the checkpoint's step, so that no line and no rollout is there twice. What
changed in the config, and what was played again, stands in `resumes.jsonl`, a line each time.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from prl.base import checkpoint_folders
from prl.base.errors import ConfigError
from prl.base.files import content_of, lines_of, naming, read_json, write_atomically
from prl.base.text import safe
from prl.config.compose import MOVED
from prl.config.named_run import over_named_run, run_of
from prl.config.run_yaml import data_of, flat, has_config, load, text_of, without_run
from prl.config.schema import AUTO, TrainConfig
from prl.rollouts.pictures import FOLDER
from prl.runs import run_dir as directory
from prl.runs.owner import LOCK
from prl.runs.provenance import command_line, data_hash
from prl.runs.result import RunResult, read_result

if TYPE_CHECKING:
    from prl.orchestrator.state import ResumePoint

FIXED = {
    "seed": "the order of tasks and the seeds of requests follow from it",
    "model.path": "the trained weights come from it",
    "model.lora": "the trained adapters, or weights, are those that it asked for",
    "model.freeze": "the optimiser's state is that of the parameters that it leaves",
    "model.renderer": "the weights were trained on its chat format",
    "trainer.optim._target_": "the optimiser's state is that of the class",
    "trainer.optim.parts.*._target_": "the optimiser's state is that of the class",
    "trainer.optim.parts.*.match": "the optimiser's state is that of its parameters",
    "trainer.optim.parts.*.dims": "the optimiser's state is that of its parameters",
    "curriculum._target_": "the position among the tasks is that of the class",
    "envs.*.curriculum._target_": "the position among the tasks is that of the class",
    "envs.*.taskset": "the position among the tasks is that of the taskset",
    "envs.*.args": "the position among the tasks is that of the tasks that it makes",
}
"""Keys that a run must go on with as it began, and why; everything else may change."""
ABSENT = "<absent>"
Tasks = Mapping[str, Mapping[str, Iterable[str]]]
"""The hashes of each env's tasks, by env and by `train` or `eval`."""


class Recorded(msgspec.Struct):
    """The fields that are read of `provenance.json`."""

    data: dict[str, dict[str, dict[str, int | str]]]
    """The number and the hash of each env's tasks, by env and by `train` or `eval`."""


# --- from the command line --------------------------------------------------------------------------------------------


def expanded(arguments: list[str]) -> list[str]:
    """Arguments in which `run.resume=<run or checkpoint>` also names that run's config, name and directory.

    Hydra composes the run's `config.yaml` with the other overrides; with `run.fork` too, which names the config alone.
    Raises ConfigError where there is no such run.
    """
    run_dir, overrides = over_named_run(arguments)
    return overrides if run_dir is None else ["--config-dir", str(run_dir), "--config-name", "config", *overrides]


def going_on(run_dir: Path) -> str:
    """The command that goes on with the run in `run_dir`, as a shell takes it."""
    return f"python -m prl.train {shlex.quote(f'run.resume={run_dir}')}"


# --- where it goes on -------------------------------------------------------------------------------------------------


def find(config: TrainConfig) -> "ResumePoint | None":
    """Return where the config says that its run goes on, or what it forks; None for a new run.

    Raises:
        ConfigError: there is no checkpoint, it is damaged, has all the steps already or is another run's, or a key of
            `FIXED` has changed.
    """
    from prl.orchestrator.state import ResumePoint, decode  # verifiers

    given, run_dir = config.run.resume, Path(config.run.dir)
    forks = config.run.fork is not None and not (given == AUTO and directory.holds_run(run_dir))
    if forks:
        given = cast(str, config.run.fork)
        run_dir = run_of(Path(given), given, "run.fork")
    elif given is None or (given == AUTO and not directory.holds_run(run_dir)):
        return None
    elif given != AUTO and run_of(Path(given), given).resolve() != run_dir.resolve():
        message = f"run.resume={given!r} is not of the run in run.dir={config.run.dir!r}"
        raise ConfigError(f"{message}: give run.resume on the command line, without run.dir")
    steps, whole = checkpoint_folders.steps_of(run_dir), given == AUTO or Path(given) == run_dir
    if given == AUTO and not steps and not has_config(run_dir) and (run_dir / LOCK).exists():  # a start died early
        return ResumePoint(run_dir, 0, None, None, {}, steps)
    changed = check_changes(data_of(config), load(run_dir / "config.yaml"))
    if whole:
        folder = checkpoint_folders.newest(run_dir, steps, fall_back=given == AUTO)
    else:
        folder = Path(given)
        checkpoint_folders.verify(folder)
    if folder is None:
        if given == AUTO:
            return ResumePoint(run_dir, 0, None, None, changed, steps)
        auto = "" if forks else "; run.resume=auto begins again in its directory"
        raise ConfigError(f"{run_dir} has no checkpoint to go on from{auto}")
    path = folder / checkpoint_folders.STATE / "run.msgpack"
    try:
        state = decode(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"{folder} is no checkpoint to go on from: {error}") from error
    if state.step + (forks or not whole) > config.max_steps:  # the run itself may be about to end
        raise ConfigError(
            f"max_steps={config.max_steps}: {folder} is of step {state.step}, so that nothing is left to train: "
            f"give max_steps={state.step + 1} or more, or an earlier checkpoint"
        )
    return ResumePoint(run_dir, state.step, folder, state, changed, steps, forks)


def check_changes(now: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys that have changed, before and now. Raises ConfigError for one of `FIXED`, and for other envs.

    Args:
        now: The config as data (`data_of`).
        recorded: The config that the run directory has.
    """
    now = without_run(dict(now))
    before, after = set(recorded.get("envs") or {}), set(now["envs"])
    if before != after:
        names = [", ".join(sorted(each)) for each in (before, after)]
        raise ConfigError(f"a run goes on with the envs that it began with: {names[0]}; now {names[1]}")
    old, new = _by_todays_names(recorded), _by_todays_names(now)
    # In the order of the new config; keys that are gone come last.
    changed = {
        key: (old.get(key, ABSENT), new.get(key, ABSENT))
        for key in [*new, *(key for key in old if key not in new)]
        if old.get(key, ABSENT) != new.get(key, ABSENT) and not key.startswith(directory.NOT_OF_A_RUN)
    }
    for key, (was, is_now) in changed.items():
        for fixed, why in FIXED.items():
            if _matches(key.split("."), fixed.split(".")):
                raise ConfigError(f"{key} was {was!r} and is {is_now!r}: a run must go on with it as it was ({why})")
    return changed


def _by_todays_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat config as one of an older version would be today, without Hydra's marks that say nothing of a run.

    Else a run that ended early under an older version would begin to train again.
    """
    values = {key: value for key, value in flat(config).items() if not key.endswith("._partial_")}
    name = values.get("weights._target_", ABSENT)
    return values | {"weights._target_": MOVED.get(name, name)}


def check_tasks(run_dir: Path, tasks: Tasks) -> None:
    """Raise ConfigError where an env's training tasks are not those that the run began with."""
    path = run_dir / "provenance.json"
    if not path.exists():  # it was killed before that was written
        return
    recorded = read_json(path, Recorded).data
    before = {env: splits["train"]["sha256"] for env, splits in recorded.items() if "train" in splits}
    for env, splits in tasks.items():
        if env in before and data_hash(splits["train"])["sha256"] != before[env]:
            raise ConfigError(f"env {env!r} has other tasks than before: start a new run, model.path=<the checkpoint>")


def _matches(key: list[str], pattern: list[str]) -> bool:
    """Return whether the parts of a key begin with those of a pattern, in which `*` is any part."""
    return len(key) >= len(pattern) and all(p in ("*", k) for k, p in zip(key, pattern, strict=False))


# --- the run directory ------------------------------------------------------------------------------------------------


def take_over(point: "ResumePoint", config: TrainConfig, tasks: Tasks) -> "ResumePoint":
    """Cut the run directory back to the checkpoint, and put the new config and a line of `resumes.jsonl` into it.

    A run that forks another's checkpoint gets its own directory, with a copy of that. Returns where the run goes on.

    The caller owns the directory. Raises ConfigError, with everything as it was, where the tasks are others or another
    process has been there since `find`.
    """
    run_dir = point.run_dir
    check_tasks(run_dir, tasks)
    if point.forks:
        return _fork(point, Path(config.run.dir), text_of(config))
    if checkpoint_folders.steps_of(run_dir) != point.steps:
        raise ConfigError(f"another process has gone on with the run in {run_dir} meanwhile: begin again")
    if point.folder is None:
        directory.clear(run_dir)
    else:
        assert point.state is not None
        first, evaluated = point.state.first_line, point.state.sync.evaluated
        kept = directory.cut_back(run_dir, point.step, first_line=first, evaluated=evaluated)
        lost = sorted(set(range(_begun_after(run_dir) + 1, first)) - kept) if "jsonl" in config.monitor else []
        _record(point, point.folder.name, lost)
    directory.write_config(run_dir, text_of(config))
    return point


def _fork(point: "ResumePoint", run_dir: Path, config: str) -> "ResumePoint":
    """Copy the checkpoint that a run forks into its new directory; its config comes last, with which it is a run."""
    source = point.folder
    assert source is not None
    directory.refuse_existing(run_dir)
    copy = checkpoint_folders.part_path(run_dir, point.step)
    with naming(copy):
        shutil.rmtree(copy, ignore_errors=True)  # of a start that died
        # It is no checkpoint until it has a manifest, which `finish` writes.
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(checkpoint_folders.MANIFEST))
        checkpoint_folders.finish(run_dir, point.step)
        pictures = point.run_dir / FOLDER
        if pictures.is_dir():  # groups that wait may show some that came in the course of the run
            ignored = shutil.ignore_patterns("*.safetensors")  # the processor makes them again
            shutil.copytree(pictures, run_dir / FOLDER, ignore=ignored, dirs_exist_ok=True)
    directory.new_run_dir(run_dir, config)
    own = replace(point, run_dir=run_dir, folder=checkpoint_folders.checkpoint_path(run_dir, point.step))
    _record(own, str(source))
    return own


def _begun_after(run_dir: Path) -> int:
    """The step after which a run began: that of the checkpoint which it forked, else 0."""
    for line in lines_of(run_dir / "resumes.jsonl", dict[str, Any], []):
        if os.path.isabs(line["checkpoint"]):
            return int(line["step"])
    return 0


def _record(point: "ResumePoint", checkpoint: str, lost: Sequence[int] = ()) -> None:
    """Add the line of this time to `resumes.jsonl`, and say it; `lost` are the steps without a line of metrics."""
    assert point.state is not None
    line = {
        "step": point.step,
        "checkpoint": checkpoint,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.orig_argv),
        "waiting_groups": len(point.state.batcher.groups),
        "issued_again": len(point.state.dispatcher.in_flight),
        "changed": {key: list(values) for key, values in point.changed.items()},
        "without_metrics": list(lost),
    }
    path = point.run_dir / "resumes.jsonl"
    before = content_of(path)
    before += b"\n" * (before[-1:] not in (b"", b"\n"))  # its last line was cut off
    write_atomically(path, before + msgspec.json.encode(line, enc_hook=str) + b"\n", durable=True)
    print(
        f"going on after step {point.step}: {line['waiting_groups']} finished groups wait for a batch, "
        f"{line['issued_again']} tasks that were in flight are played again",
        file=sys.stderr,
    )
    if lost:
        steps = ", ".join(map(str, lost[:20])) + ", …" * (len(lost) > 20)
        print(f"warning: {point.run_dir}/metrics.jsonl has lost its lines of these steps: {steps}", file=sys.stderr)
    for key, (was, now) in point.changed.items():
        print(safe(f"  {key}: {was} → {now}"), file=sys.stderr)


def completed(config: TrainConfig) -> RunResult | None:
    """The result of a run that has all its steps, or that ended early under the same settings; None of any other.

    From a checkpoint that is named the run goes on, whatever came after it. Raises ConfigError for a changed key that
    a run must go on with.
    """
    given, run_dir = config.run.resume, Path(config.run.dir)
    result = read_result(run_dir) if given == AUTO or (given and Path(given) == run_dir) else None
    if result is None or result.status != "completed":
        return None
    early = result.steps < config.max_steps
    if early and result.ended_because is None:
        return None
    changed = check_changes(data_of(config), load(run_dir / "config.yaml"))
    return None if early and changed else result
