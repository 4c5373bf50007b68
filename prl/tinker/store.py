"""The directory of a server, by which one that was killed goes on where it was.

sessions.json                     sessions, and the snapshot of each sampling session
models/<model>/model.json         what the model is
models/<model>/journal/<n>        request n, as it came; written before the client hears that it is accepted
models/<model>/state_<n>/         the model after request n: weights, optimiser, gradient, the last results
models/<model>/weights/<name>/    a checkpoint: a model folder, and beside it adapter/ (peft) and state/
models/<model>/sampler_weights/   snapshots that have a name
models/<model>/ephemeral/         snapshots that have none; the last ones are kept

A model is its newest state and the requests behind it, which are run again when the server starts. So none is lost, and
none is in the model twice.
"""

import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from prl.base.errors import ConfigError
from prl.base.files import read_json, write_atomically, write_tensors, writing
from prl.tinker.wire import Lora, RequestError, SaveWeights

SCHEME = "tinker://"
NAME = re.compile(r"(?!\S*\.writing)[A-Za-z0-9_][\w.-]{0,99}", re.ASCII)
KINDS = {"weights": "training", "sampler_weights": "sampler"}
PATH = re.compile(rf"{SCHEME}([\w:-]{{1,200}})/({'|'.join(KINDS)})/({NAME.pattern})", re.ASCII)
EPHEMERAL = "ephemeral"
KEPT = 16
"""Snapshots without a name that a model keeps."""
TENSORS, STATE, MODEL, CHECKPOINT = "tensors.safetensors", "state.msgpack", "model.json", "checkpoint.json"


class ModelRecord(msgspec.Struct):
    """The record of a model."""

    model_id: str
    session_id: str
    lora: Lora | None
    user_metadata: dict[str, Any] | None = None


class State(msgspec.Struct):
    """A model after a request, beside its tensors."""

    step: int
    results: dict[str, dict[str, Any]]
    """Results of its last requests, by their ids."""
    last: int = 0
    """Number that the client gave the last request that was accepted then."""


class Request(msgspec.Struct):
    """A request that was accepted."""

    request_id: str
    kind: str
    body: bytes
    content_type: str = ""
    tokens: int = 0


class Checkpoint(msgspec.Struct):
    """The record of a checkpoint or a snapshot, beside its files. The protocol shows it by the last fields."""

    model_id: str
    order: int
    """Number of the request that made it."""
    step: int
    lora: Lora | None
    checkpoint_id: str
    checkpoint_type: str
    tinker_path: str
    time: datetime
    size_bytes: int
    user_metadata: dict[str, str] | None
    expires_at: datetime | None


class Sessions(msgspec.Struct):
    """The content of `sessions.json`."""

    sessions: dict[str, dict[str, Any] | None] = {}
    """User metadata of each session."""
    samplers: dict[str, str | None] = {}
    """Folder of the snapshot of each sampling session, below the directory; None = the base."""
    joined: dict[str, int] = {}
    """Number of further clients of a sampling session."""
    base: str = ""
    """Folder of the base."""


class ModelStore:
    """The folder of a model."""

    def __init__(self, folder: Path, record: ModelRecord):
        self.folder = folder
        self.record = record
        write_atomically(folder / MODEL, msgspec.json.encode(record))

    def journal(self, after: int) -> Iterator[tuple[int, Request]]:
        """Yield the requests behind a state, with their numbers, in their order."""
        names = (path.name for path in (self.folder / "journal").glob("*") if path.name.isdigit())
        for order in sorted(map(int, names)):
            if order > after:
                yield order, msgspec.msgpack.decode((self.folder / "journal" / str(order)).read_bytes(), type=Request)

    def accept(self, order: int, request: Request) -> None:
        """Write a request down."""
        write_atomically(self.folder / "journal" / str(order), msgspec.msgpack.encode(request))

    def asked_at(self) -> datetime:
        """When the model was last asked for something."""
        return datetime.fromtimestamp((self.folder / "journal").stat().st_mtime, UTC)

    def save(self, order: int, tensors: dict[str, Tensor], state: State) -> None:
        """Write the model after a request; then what came before is not needed any more."""
        final = self.folder / f"state_{order}"
        if final.is_dir():
            return
        with writing(final) as folder:
            write_tensors(tensors, folder / TENSORS)
            (folder / STATE).write_bytes(msgspec.msgpack.encode(state))
        for path in self.folder.glob("state_*"):  # also what a server had begun that was killed then
            if path != final:
                shutil.rmtree(path, ignore_errors=True)
        for path in (self.folder / "journal").glob("*"):
            if path.name.isdigit() and int(path.name) <= order:
                path.unlink(missing_ok=True)

    def load(self) -> tuple[int, dict[str, Tensor], State] | None:
        """The newest state: its number, the tensors and the rest; None where the model has none yet."""
        found = [path.name.removeprefix("state_") for path in self.folder.glob("state_*")]
        order = max((int(number) for number in found if number.isdigit()), default=None)
        if order is None:
            return None
        folder = self.folder / f"state_{order}"
        return order, load_file(folder / TENSORS), msgspec.msgpack.decode((folder / STATE).read_bytes(), type=State)

    def describe(self, new: Path, folder: Path, order: int, step: int, asked: SaveWeights) -> None:
        """Write what a checkpoint or a snapshot is that will be `folder`, whose files are in `new` as yet."""
        made = Checkpoint(
            model_id=self.record.model_id,
            order=order,
            step=step,
            lora=self.record.lora,
            checkpoint_id=f"{folder.parent.name}/{folder.name}",
            checkpoint_type=KINDS.get(folder.parent.name, EPHEMERAL),
            tinker_path=uri_of(self.record.model_id, folder),
            time=datetime.now(UTC),
            size_bytes=sum(file.stat().st_size for file in new.rglob("*") if file.is_file()),
            user_metadata=asked.user_metadata,
            expires_at=end_of(asked.ttl_seconds),
        )
        (new / CHECKPOINT).write_bytes(msgspec.json.encode(made))

    def prune(self) -> None:
        """Remove snapshots without a name, but for the last ones."""
        snapshots = sorted((self.folder / EPHEMERAL).glob("*"), key=lambda path: int(path.name))
        for path in snapshots[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)


class Store:
    """The directory of a server, whose base is at the path `base`. Raises ConfigError for that of another base."""

    def __init__(self, folder: Path, base: str):
        self.folder = folder
        path = folder / "sessions.json"
        self.sessions = read_json(path, Sessions) if path.is_file() else Sessions(base=base)
        if self.sessions.base not in ("", base):  # an adapter of it may fit, and mean nothing
            raise ConfigError(
                f"dir={folder}: its models were trained beside {self.sessions.base}, not {base}: give another dir; "
                f"if that model was moved, correct `base` in {path}"
            )

    def write_sessions(self) -> None:
        """Write sessions and sampling sessions down."""
        write_atomically(self.folder / "sessions.json", msgspec.json.encode(self.sessions))

    def add(self, record: ModelRecord) -> ModelStore:
        """Make the folder of a model."""
        return ModelStore(self.folder_of(record.model_id), record)

    def models(self) -> list[ModelStore]:
        """The models that are there, in the order of their ids."""
        records = [read_json(path, ModelRecord) for path in sorted((self.folder / "models").glob(f"*/{MODEL}"))]
        return [self.add(record) for record in records]

    def folder_of(self, model_id: str) -> Path:
        """The folder of a model, whose id has colons in it."""
        return self.folder / "models" / model_id.replace(":", "-")

    def checkpoint(self, path: str, field: str = "path") -> tuple[Path, Checkpoint]:
        """The folder of a checkpoint by its URI, and what it is. Raises RequestError for one that is not there."""
        match = PATH.fullmatch(path)
        if match is None:
            raise RequestError(
                f"{field}={path[:200]!r}: give tinker://<model>/weights/<name> or …/sampler_weights/<name>"
            )
        folder = self.folder_of(match[1]) / match[2] / match[3]
        record = read_checkpoint(folder)
        if record is None:
            raise RequestError(f"{field}={path[:200]!r}: this server has no such checkpoint", 404)
        return folder, record

    def delete(self, path: str) -> None:
        """Remove a checkpoint. Raises RequestError for one that is not there."""
        shutil.rmtree(self.checkpoint(path)[0])

    def set_ttl(self, path: str, ttl_seconds: int | None) -> None:
        """Have a checkpoint go after some time; None = never. Raises RequestError for one that is not there."""
        folder, record = self.checkpoint(path)
        write_atomically(folder / CHECKPOINT, msgspec.json.encode(replace(record, expires_at=end_of(ttl_seconds))))

    def checkpoints(self, model_id: str = "*") -> list[Checkpoint]:
        """The checkpoints of a model, or of all, the oldest first."""
        models, name = self.folder / "models", self.folder_of(model_id).name
        records = [
            read_checkpoint(folder)
            for kind in KINDS
            for folder in models.glob(f"{name}/{kind}/*")
            if folder.suffix != ".writing"
        ]
        return sorted(filter(None, records), key=lambda record: record.time)


def uri_of(model_id: str, folder: Path) -> str:
    """Return the URI of a checkpoint."""
    return f"{SCHEME}{model_id}/{folder.parent.name}/{folder.name}"


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Read what a checkpoint is; None where there is none, or not any more: its time is over, and it is removed."""
    if not (folder / CHECKPOINT).is_file():
        return None
    record = read_json(folder / CHECKPOINT, Checkpoint)
    if record.expires_at is None or record.expires_at > datetime.now(UTC):
        return record
    shutil.rmtree(folder, ignore_errors=True)
    return None


def end_of(ttl_seconds: int | None) -> datetime | None:
    """Return when the time of a checkpoint is over that begins now."""
    return None if ttl_seconds is None else datetime.now(UTC) + timedelta(seconds=ttl_seconds)
