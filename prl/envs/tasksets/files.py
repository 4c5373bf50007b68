"""Rows of data files (.jsonl, .json, .csv, .parquet), on this machine or of a data set on the hub."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prl.monitors.text import in_one_line

HUB_WAIT = 5.0
"""[s] Time for the hub to answer at all."""
LONGEST_FIELD = 2**31 - 1
"""The most characters of a CSV field that Python's reader takes on every platform."""
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def rows_of(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row with its place in the file, `line 3` or `row 3`.

    Raises ValueError naming the file, and the place, where it cannot be read.
    """
    if not file.is_file():
        raise ValueError(f"{str(file)!r} is not a file; those of a split by a pattern: <folder>/train-*.parquet")
    try:
        reader = READERS[file.suffix.lower()]
    except KeyError:
        raise ValueError(f"{file}: read are {', '.join(SUFFIXES)}") from None
    yield from reader(file)


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    # Each line is decoded separately, so that the message can name one that is not UTF-8.
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"line {number}", _decoded(line, f"{file}, line {number}")


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    rows = _decoded(file.read_bytes(), str(file))
    if not isinstance(rows, list):
        raise ValueError(f"{file} must hold a list of rows")
    yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))


class WrittenFloat(float):
    """A number of a JSON file, of which `str` is what stands there: 0.00001, where Python writes 1e-05."""

    text: str

    def __new__(cls, text: str) -> "WrittenFloat":
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text


def _decoded(text: bytes, place: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"), parse_float=WrittenFloat)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deep
        raise ValueError(f"{place} is not JSON in UTF-8: {error}") from error


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(LONGEST_FIELD)
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened)
            reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            for row in reader:
                if None in row:  # what DictReader calls the values behind the last column
                    raise ValueError(
                        f"{file}, line {reader.line_num}: {len(row) - 1 + len(row[None])} values for "
                        f"{len(row) - 1} columns; one with a comma in it needs quotes"
                    )
                yield f"line {reader.line_num}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not CSV in UTF-8: {error}") from error


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet  # heavy, and used only here

    table = pyarrow.parquet.read_table(file)
    # As text, numbers have the digits that they were written with: Python's floats of 32 bits have others.
    fields = [
        field.with_type(pyarrow.string())
        if pyarrow.types.is_floating(field.type) or pyarrow.types.is_decimal(field.type)
        else field
        for field in table.schema
    ]
    rows = table.cast(pyarrow.schema(fields)).to_pylist()
    yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))


READERS = dict(zip(SUFFIXES, (_json_lines, _json, _csv, _parquet), strict=True))


def hub_files(name: str, split: str) -> list[Path]:
    """Return the files of a split of a data set, from the hub's cache on this machine, else from the hub.

    Args:
        name: `owner/name`, or `owner/name/folder` where a folder holds the configuration wanted.
        split: The files of a split begin with its name, e.g. `train-00000-of-00001.parquet`, or lie in a folder of it.

    Raises:
        ValueError: The hub does not deliver it, or it has no such files.
    """
    from huggingface_hub import HfApi, snapshot_download

    repo, folder = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    wanted: dict[str, Any] = {"repo_id": repo, "repo_type": "dataset"}
    wanted["allow_patterns"] = [f"{folder + '/' if folder else ''}*{split}*{suffix}" for suffix in SUFFIXES]
    try:
        cached = _of_split(Path(snapshot_download(**wanted, local_files_only=True)) / folder, split)
        if cached:
            return cached
    except OSError:  # not in the cache
        pass
    try:
        HfApi().dataset_info(repo, timeout=HUB_WAIT)  # the download itself would retry for half a minute
        root = Path(snapshot_download(**wanted)) / folder
    except Exception as error:  # exceptions of httpx, the hub's client and the system have no common base
        raise ValueError(
            f"{repo} is not in the hub's cache on this machine, and the hub fails ({in_one_line(error)}): "
            f"set path to a {' or '.join(SUFFIXES)} file of its rows"
        ) from error
    downloaded = _of_split(root, split)
    if not downloaded:
        raise ValueError(f"{name} has no {split}*{', '.join(SUFFIXES)} on the hub")
    return downloaded


def _of_split(root: Path, split: str) -> list[Path]:
    """Return the readable files under `root` that belong to a split; raise ValueError if several folders have some."""
    readable = [path for path in sorted(root.rglob("*")) if path.suffix.lower() in SUFFIXES]
    files = [path for path in readable if path.name.startswith(split) or path.parent.name == split]
    folders = sorted({path.parent.relative_to(root).as_posix() for path in files})
    if len(folders) > 1:
        raise ValueError(f"several folders hold a {split} split ({', '.join(folders)}): name one, owner/name/folder")
    return files
