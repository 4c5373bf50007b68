"""Files that appear whole or not at all, and reading what may be damaged."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prl.base.errors import UNREADABLE, ConfigError, PrlError, unwritable

T = TypeVar("T")


def step_name(step: int) -> str:
    """Name of a step's folder; names sort as the steps do."""
    return f"step_{step:06d}"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise PrlError, which names it, for an OSError that keeps `path` from being written."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a library's own error says what it is about
            raise
        raise PrlError(unwritable(error, str(path))) from error


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write `path` so that a reader sees all of it or nothing; `durable`: also after a crash of the machine."""
    # In the same folder, since a rename is atomic within one file system only; by process, for two at once.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_tensors(tensors: Any, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the mode that any other file gets: the library's own is for its owner alone."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # by the umask, which no thread may ask for without changing it for all
    save_file(tensors, path, metadata)
    path.chmod(mode)


def content_of(path: Path) -> bytes:
    """The content of a file that may not be there yet."""
    return path.read_bytes() if path.is_file() else b""


def read_json(path: Path, kind: type[T]) -> T:
    """The content of a JSON file. Raises ConfigError, naming it, where that is no `kind`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{path} is damaged ({error}): put back what prl wrote there, or remove it") from error


def lines_of(path: Path, kind: type[T], problems: list[str]) -> list[T]:
    """The lines of a JSON Lines file but for those that cannot be read, and a last one that is still being written."""
    try:
        written = content_of(path)
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
        return []
    lines, damaged = lines_in(written, kind)
    if damaged:
        problems.append(f"{path}: {damaged} line{'s' * (damaged != 1)} cannot be read")
    return lines


def lines_in(written: bytes, kind: type[T]) -> tuple[list[T], int]:
    """The lines of JSON Lines but for a last one that is still being written, and how many cannot be read."""
    decoder = msgspec.json.Decoder(kind)
    lines, damaged = [], 0
    # Up to the last newline: a run that goes on may be writing the line behind it.
    for line in written[: written.rfind(b"\n") + 1].splitlines():
        try:
            lines += [decoder.decode(line)] if line.strip() else []
        except UNREADABLE:
            damaged += 1
    return lines, damaged


@contextlib.contextmanager
def writing(final: Path) -> Iterator[Path]:
    """Yield an empty folder, which gets its `final` name once the block has ended, and goes where the block raises."""
    folder = final.with_name(f"{final.name}.writing")
    shutil.rmtree(folder, ignore_errors=True)  # what a killed process has left
    folder.mkdir(parents=True)
    try:
        yield folder
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
