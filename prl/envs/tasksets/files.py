"""Rows of data files (.jsonl, .json, .csv, .parquet), on this machine or of a data set on the hub."""

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from prl.base.text import in_one_line

HUB_WAIT = 5.0
"""[s] Time for the hub to answer at all."""
LONGEST_FIELD = 2**31 - 1
"""The most characters of a CSV field that Python's reader takes on every platform."""
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
NO_DATA = ("readme.json", "state.json", "dataset_info.json", "dataset_dict.json")
"""Files that lie beside those of a split and have no rows."""
SHARD = re.compile(r"(?:(?P<split>.+?)[-_.])??(?:(?P<number>\d+)[-_]of[-_](?P<count>\d+)(?:[-_.]\w+)?|\d+)")
"""The stem of a file that is a part of a split: `train-2`, `train-00002-of-00003`, or that with a hash behind it."""


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
    line = 1  # where the row begins that is read
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened, strict=True)
            names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            _refuse_twins(names, f"{file}, line 1")
            line = reader.line_num + 1
            for row in reader:
                if None in row:  # what DictReader calls the values behind the last column
                    raise ValueError(
                        f"{file}, line {reader.line_num}: {len(row) - 1 + len(row[None])} values for "
                        f"{len(row) - 1} columns; one with a comma in it needs quotes"
                    )
                yield f"line {reader.line_num}", row
                line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{file}, line {line}, is not CSV: {error}; is there a quote that is not closed?") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not CSV in UTF-8: {error}") from error


def _refuse_twins(names: list[str], place: str) -> None:
    """Raise ValueError if two columns have the same name."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{place}: two columns are named {twice[0]!r}: rename one")


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet  # heavy, and used only here

    try:
        _refuse_twins(pyarrow.parquet.read_schema(file).names, str(file))
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} is not parquet: {in_one_line(error)}") from error
    readers = {field.name: _reader_of(field.type) for field in table.schema}
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"row {number}", {key: None if value is None else readers[key](value) for key, value in row.items()}


def _reader_of(kind: Any) -> Callable[[Any], Any]:
    """Return what turns values of an Arrow type into those of a row: floats, at any depth, are the text in the file.

    NaN is no value: pandas writes it where there is none. Python's floats of 32 and 16 bits have other digits. Fields
    of a struct without a value are left out: a file has them where its rows have different keys.
    """
    from pyarrow import types

    if types.is_floating(kind):
        return _reader_of_floats(kind.to_pandas_dtype())
    if types.is_decimal(kind):
        return str
    if types.is_struct(kind):
        fields = {field.name: _reader_of(field.type) for field in kind}
        return lambda value: {name: read(value[name]) for name, read in fields.items() if value[name] is not None}
    if types.is_map(kind):
        of_item = _reader_of(kind.item_type)
        return lambda value: {key: of_item(item) for key, item in value if item is not None}
    if types.is_nested(kind):  # lists of every kind
        of_item = _reader_of(kind.value_type)
        return lambda value: [None if item is None else of_item(item) for item in value]
    return _reader_of(kind.value_type) if types.is_dictionary(kind) else lambda value: value


def _reader_of_floats(number: Any) -> Callable[[Any], Any]:
    """Return what turns floats into text, and NaN into None; what is infinite stays a number, which no row may have."""
    import numpy

    def read(value: float) -> Any:
        if not math.isfinite(value):
            return None if math.isnan(value) else value
        return numpy.format_float_positional(number(value), trim="-")

    return read


READERS = dict(zip(SUFFIXES, (_json_lines, _json, _csv, _parquet), strict=True))


def hub_files(name: str, split: str) -> list[Path]:
    """Return the files of a split of a data set, from the hub's cache on this machine, else from the hub.

    Args:
        name: `owner/name`, or `owner/name/folder` where a folder holds the configuration wanted.
        split: Its files are named `<split>`, `<split>-<number>` or `<split>-00000-of-00001`, or lie in a folder of it.

    Raises:
        ValueError: The hub does not deliver it, it has no such files, or some of them are missing.
    """
    from huggingface_hub import HfApi, snapshot_download

    repo, folder = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    wanted: dict[str, Any] = {"repo_id": repo, "repo_type": "dataset"}
    forms = [f"*{split}{form}{suffix}" for form in ("", "[-_.][0-9]*", "/*") for suffix in SUFFIXES]
    wanted["allow_patterns"] = [f"{folder}/{form}" if folder else form for form in forms]
    try:
        root = Path(snapshot_download(**wanted, local_files_only=True)) / folder
        return of_split(root, root.rglob("*"), split)
    except (MissingFiles, OSError) as error:  # OSError: it is not in the cache, or not as the hub's list there says
        in_cache = in_one_line(error)
    try:
        listed = HfApi().dataset_info(repo, timeout=HUB_WAIT)  # the download itself would retry for half a minute
        of_split(Path(folder), [Path(file.rfilename) for file in listed.siblings or ()], split)
        root = Path(snapshot_download(**wanted)) / folder
    except Exception as error:  # exceptions of httpx, the hub's client and the system have no common base
        raise ValueError(
            f"{repo} is not in the hub's cache on this machine ({in_cache}), and the hub fails "
            f"({in_one_line(error)}): set path to a {' or '.join(SUFFIXES)} file of its rows"
        ) from error
    return of_split(root, root.rglob("*"), split)


class MissingFiles(ValueError):
    """A folder has not all files of a split."""


def of_split(root: Path, paths: Iterable[Path], split: str) -> list[Path]:
    """Return those of `paths` under `root` that can be read and belong to a split.

    Raises ValueError if several folders have some or a file is there in two formats, MissingFiles if there are none, or
    fewer than their names say.
    """
    data = [path for path in sorted(paths) if path.name.lower() not in NO_DATA]
    readable = [path for path in data if path.suffix.lower() in SUFFIXES and path.is_relative_to(root)]
    files = [path for path in readable if split in (path.stem, path.parent.name, _split_name(path))]
    folders = sorted({path.parent.relative_to(root).as_posix() for path in files})
    if len(folders) > 1:
        raise ValueError(f"several folders hold a {split} split ({', '.join(folders)}): name one, owner/name/folder")
    if not files:
        there = ", ".join(sorted(set(map(_split_name, readable)))) or "none"
        raise MissingFiles(f"there is no split {split!r}; its splits: {there}")
    files = [path for path in files if path.stem == split] or files  # train.jsonl rather than train-2.jsonl
    by_stem: dict[Path, Path] = {}
    for path in files:
        other = by_stem.setdefault(path.with_suffix(""), path)
        if other != path:
            raise ValueError(f"{other} and {path.name} may be the same rows twice: set path to the file wanted")
    if missing := missing_parts(files):
        raise MissingFiles(missing)
    return files


def _split_name(file: Path) -> str:
    """Return the name of the split that a file is a part of, by its own name or its folder's."""
    shard = SHARD.fullmatch(file.stem)
    return file.stem if shard is None else shard["split"] or file.parent.name


def missing_parts(files: Iterable[Path]) -> str | None:
    """Return what is missing of files that are named as parts of a whole, 00002 of 00003; None if nothing is."""
    parts: dict[tuple[Path, int], set[int]] = defaultdict(set)
    for file in files:
        shard = SHARD.fullmatch(file.stem)
        if shard and shard["count"]:
            parts[file.parent / str(shard["split"]), int(shard["count"])].add(int(shard["number"]))
    for (path, count), numbers in parts.items():
        if len(numbers) < count:
            return f"{path}: {len(numbers)} of {count} files are there, as their names say"
    return None
