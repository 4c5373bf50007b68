"""How orchestrator and trainer agree on a transfer of weights: by messages between them, and files where peers meet.

Peers meet in a folder of the run directory (`peers-*`, `meeting.py`), which is the user's alone, since whoever writes
into it is sent the weights.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from prl.wire.exchange import Answer, Done, Exchange, Kind, Layout, Loaded, Order, Passing
from prl.wire.peers import called_off


class Transfers:
    """What either side says and knows. The trainer's is that of its first rank; the others are told nothing."""

    exchange: Exchange
    """The way to the other side, once the transport has one."""

    def __init__(self, folder: Path, bucket_bytes: int):
        self.folder, self.bucket_bytes = folder.absolute(), bucket_bytes

    def begin(self) -> None:
        """Make the folder anew, before the trainer of a run starts."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True)

    def write(self, message: Layout | Order | Answer | Loaded) -> None:
        """Send the other side a message."""
        self.exchange.post(message)

    def read(self, kind: type[Kind]) -> Kind | None:
        """The newest message of a kind, None where there is none. Raises PrlError for what is none."""
        return self.exchange.read(kind)

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
        self.exchange.post(Passing(True))
        try:
            yield
        finally:
            self.exchange.post(Passing(False))

    @property
    def passes(self) -> bool:
        """Whether the trainer need not wait for its version to be sent before it trains on."""
        said = self.read(Passing)
        return said is not None and said.on

    def end(self) -> None:
        """Let the trainer go: nothing is ordered any more."""
        self.exchange.post(Done())

    @property
    def ended(self) -> bool:
        return self.read(Done) is not None
