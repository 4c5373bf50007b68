"""Checkpoints of a run: folders that appear whole or not at all, each with a manifest of its files.

checkpoints/step_000020/        a Hugging Face model folder, for `from_pretrained` and `model.path`, and beside it
    state/trainer.*             optimiser, random generators (prl/trainer/checkpoint_part.py)
    state/run.msgpack           the orchestrator's side (prl/orchestrator/state.py)
    manifest.json               size and SHA-256 of every other file; written last
checkpoints/.step_000020/       the trainer's part, complete; the orchestrator adds its own and renames the folder
"""

import contextlib
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from prl.base.errors import UNREADABLE, ConfigError
from prl.base.files import step_name, write_atomically
from prl.base.text import as_message

MANIFEST, STATE = "manifest.json", "state"


class File(msgspec.Struct):
    """A file of a checkpoint."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct):
    """The content of `manifest.json`."""

    step: int
    files: dict[str, File]
    """Files by their paths in the folder."""


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint of `step`."""
    return run_dir / "checkpoints" / step_name(step)


def part_path(run_dir: Path, step: int) -> Path:
    """Folder of the trainer's part of a checkpoint that is not finished."""
    return run_dir / "checkpoints" / f".{step_name(step)}"


def steps_of(run_dir: Path) -> list[int]:
    """The steps that have a checkpoint, ascending; whether it is undamaged is for `verify` to say."""
    return _steps(path.name for path in (run_dir / "checkpoints").glob("step_*"))


def parts_of(run_dir: Path) -> list[int]:
    """The steps of which the trainer has written its part and which are not finished, ascending."""
    return _steps(path.name.removeprefix(".") for path in (run_dir / "checkpoints").glob(".step_*"))


def finish(run_dir: Path, step: int) -> None:
    """Make the part of `step`, to which everything has been added, a checkpoint that survives a crash of the machine.

    Every file is on disk before the folder gets its name.
    """
    folder, final = part_path(run_dir, step), checkpoint_path(run_dir, step)
    seal(folder, step)
    # One of an earlier part of the run, which is trained over again: a folder cannot be renamed onto it.
    shutil.rmtree(final, ignore_errors=True)
    folder.rename(final)
    sync_folder(final.parent)


def seal(folder: Path, step: int) -> None:
    """Put every file of `folder` on disk, and write its manifest."""
    files = {str(path.relative_to(folder)): _synced(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    write_atomically(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(Manifest(step, files))), durable=True)
    # A file is safe once its name is: that stands in the folder, which has to reach the disk as well.
    for parent in {folder, *((folder / name).parent for name in files)}:
        sync_folder(parent)


def verify(folder: Path, *, state: bool = True) -> int:
    """The step of a checkpoint. Raises ConfigError naming what is damaged or missing in it.

    Without `state` only the model is looked at, not what a run needs beside it to go on: whoever copies that may name
    the copy as they like. One that a run goes on from is cut back to by its name.
    """
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise ConfigError(f"{folder} is no checkpoint to go on from: it has no {MANIFEST}") from None
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{folder} is damaged: {MANIFEST} cannot be read ({error})") from error
    if state and _steps([folder.name]) not in ([], [manifest.step]):
        raise ConfigError(
            f"{folder} is damaged: by its {MANIFEST} it is the checkpoint of step {manifest.step}, under another "
            "step's name"
        )
    for name, file in manifest.files.items():
        if not state and name.startswith(f"{STATE}/"):
            continue
        path = folder / name
        if not path.is_file():
            raise ConfigError(f"{folder} is damaged: {name} is missing")
        # Sizes first: a file that was cut off is named without reading gigabytes.
        size = path.stat().st_size
        if size != file.bytes:
            raise ConfigError(f"{folder} is damaged: {name} has {size} bytes instead of {file.bytes}")
        if _sha256(path) != file.sha256:
            raise ConfigError(f"{folder} is damaged: the content of {name} is not what was written")
    return manifest.step


def newest(run_dir: Path, steps: list[int], *, fall_back: bool) -> Path | None:
    """The newest checkpoint of those of `steps`, ascending; None where there is none.

    Raises ConfigError where it is damaged, with the one before it; with `fall_back` that one is taken, with a warning,
    and the error is that none is whole.
    """
    # The newest one that is whole: a run that was killed while the disk was full may have left a damaged one.
    for number in reversed(range(len(steps))):
        folder = checkpoint_path(run_dir, steps[number])
        try:
            verify(folder)
            return folder
        except ConfigError as error:
            before = checkpoint_path(run_dir, steps[number - 1]) if number else None
            if not fall_back or before is None:
                hint = "there is none before it" if before is None else f"the one before it: {before}"
                raise ConfigError(f"{error}; {hint}") from None
            print(f"warning: {as_message(str(error))}; going on from the one before it", file=sys.stderr)
    return None


def prune(run_dir: Path, *, keep_last: int | None, keep_every: int | None) -> None:
    """Remove the checkpoints that are neither among the last `keep_last` nor of a multiple of `keep_every`."""
    for step in steps_of(run_dir)[: -keep_last if keep_last else 0]:
        if not (keep_every and step and step % keep_every == 0):
            doomed = checkpoint_path(run_dir, step).with_name(f".{step_name(step)}.writing")
            checkpoint_path(run_dir, step).rename(doomed)  # a checkpoint goes whole, too
            shutil.rmtree(doomed, ignore_errors=True)


def _steps(names: Iterable[str]) -> list[int]:
    """The steps of folders, ascending; other names are somebody's own, as of a copy."""
    matches = [re.fullmatch(r"step_([0-9]{6,})", name) for name in names]
    return sorted(int(match[1]) for match in matches if match is not None)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder reach the disk; a file system that cannot is left alone."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_file(path: Path) -> None:
    """Have what a file has now reach the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _synced(path: Path) -> File:
    """A file's entry in the manifest, once it is on disk."""
    sync_file(path)
    return File(path.stat().st_size, _sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
