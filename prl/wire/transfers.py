"""How orchestrator and trainer agree on a transfer of weights: small files, each of one writer, whole or not there.

layout.json     trainer: what it sends, in its order; once, before its first version
order.json      orchestrator: send what you have to the peers that meet at `store`
answer.json     trainer: which version that is
loaded.json     orchestrator: the engines have this version, and the trainer may train on
step.json       the trainer's first rank to its others: what all do next
pass, done      orchestrator: the trainer need not wait for that; nothing is ordered any more
peers-*         where peers meet (`meeting.py`)

The folder is the user's alone, since whoever writes into it is sent the weights.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from prl.errors import UNREADABLE, PrlError
from prl.wire.buckets import TensorSpec
from prl.wire.files import regular, write_atomically
from prl.wire.peers import called_off

Message = TypeVar("Message", bound=msgspec.Struct)


class Layout(msgspec.Struct):
    """What the trainer sends, and how."""

    device: Literal["cpu", "cuda"]
    bucket_bytes: int
    tensors: list[TensorSpec]


class Order(msgspec.Struct):
    """The version that the trainer has is to be sent."""

    number: int
    store: str
    """The file at which the peers meet; the one of the order before where they are the same."""
    world_size: int
    """The trainer and all workers."""
    timeout_s: float


class Answer(msgspec.Struct):
    """To the order of that number: it is being sent, as soon as the peers have met."""

    number: int
    version: int


class Loaded(msgspec.Struct):
    """What the engines have."""

    version: int


class Step(msgspec.Struct):
    """What all ranks of the trainer do next."""

    number: int
    what: Literal["send", "train", "end"]


class Transfers:
    """Both sides of the folder."""

    def __init__(self, folder: Path, bucket_bytes: int):
        self.folder, self.bucket_bytes = folder.absolute(), bucket_bytes
        self._read: dict[str, tuple[tuple[int, int], Any]] = {}
        """What was read last from each file, with what tells it from the next: both sides look all the time."""

    def begin(self) -> None:
        """Make the folder anew, before the trainer of a run starts."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True)

    def write(self, message: Layout | Order | Answer | Loaded | Step) -> None:
        """Show the other side a message, in place of the one before."""
        write_atomically(Path(self._path(type(message))), msgspec.json.encode(message))

    def read(self, kind: type[Message]) -> Message | None:
        """The newest message of a kind, None where there is none. Raises PrlError for what is none."""
        path = self._path(kind)
        try:
            state = os.stat(path)
            if (known := self._read.get(path)) is not None and known[0] == (state.st_ino, state.st_mtime_ns):
                return cast(Message, known[1])
            message = msgspec.json.decode(regular(Path(path)).read_bytes(), type=kind)
            self._read[path] = (state.st_ino, state.st_mtime_ns), message
            return message
        except FileNotFoundError:
            return None
        except (OSError, *UNREADABLE) as error:
            raise PrlError(f"{path} does not hold what it should: {error}") from error

    def _path(self, kind: type[msgspec.Struct]) -> str:
        return f"{self.folder}/{kind.__name__.lower()}.json"

    def store(self, number: int) -> str:
        """The path at which a new set of peers meets."""
        return str(self.folder / f"peers-{number}")

    def is_off(self, store: str) -> bool:
        """Whether the peers that met there have given up."""
        return called_off(store).exists()

    def call_off(self, store: str) -> None:
        """Have the peers that meet there give up what they wait for."""
        called_off(store).touch()

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Inside the block the trainer does not wait for orders."""
        (self.folder / "pass").touch()
        try:
            yield
        finally:
            (self.folder / "pass").unlink(missing_ok=True)

    @property
    def passes(self) -> bool:
        """Whether the trainer need not wait for its version to be sent before it trains on."""
        return (self.folder / "pass").exists()

    def end(self) -> None:
        """Let the trainer go: nothing is ordered any more."""
        with contextlib.suppress(FileNotFoundError):  # the run ends before it began
            (self.folder / "done").touch()

    @property
    def ended(self) -> bool:
        return (self.folder / "done").exists()
