"""What orchestrator and trainer ranks say to each other with `transport=broadcast`, and what a side was told so far."""

from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import msgspec

from prl.errors import UNREADABLE, PrlError
from prl.wire.buckets import TensorSpec
from prl.wire.messages import StepBatch

if TYPE_CHECKING:  # it takes ZeroMQ, which no other transport needs
    from prl.wire.session import OrchestratorEnd, RankEnd

# --- orchestrator -> every rank ---------------------------------------------------------------------------------------


class Batch(msgspec.Struct, tag=True):
    """The rank's share of a step."""

    content: StepBatch


class End(msgspec.Struct, tag=True):
    """The run ends with that step."""

    last_step: int


# --- orchestrator -> the first rank -----------------------------------------------------------------------------------


class Order(msgspec.Struct, tag=True):
    """The version that the trainer has is to be sent."""

    number: int
    store: str
    """The file at which the peers meet; the one of the order before where they are the same."""
    world_size: int
    """The trainer and all workers."""
    timeout_s: float


class Loaded(msgspec.Struct, tag=True):
    """What the engines have: the trainer may train on."""

    version: int


class Passing(msgspec.Struct, tag=True):
    """Whether the trainer need not wait for an order before it trains on."""

    on: bool


class Done(msgspec.Struct, tag=True):
    """Nothing is ordered any more."""


# --- the first rank -> orchestrator -----------------------------------------------------------------------------------


class Layout(msgspec.Struct, tag=True):
    """What the trainer sends, and how; said once, before its first version."""

    device: Literal["cpu", "cuda"]
    bucket_bytes: int
    tensors: list[TensorSpec]


class Answer(msgspec.Struct, tag=True):
    """To the order of that number: it is being sent, as soon as the peers have met."""

    number: int
    version: int


class Published(msgspec.Struct, tag=True):
    """A policy version is there."""

    version: int
    metrics: bytes
    """As JSON."""


FromOrchestrator = Batch | End | Order | Loaded | Passing | Done
FromRank = Layout | Answer | Published
Message = FromOrchestrator | FromRank
UNREAD = 256 << 20
"""Bytes of versions that a rank has published and nobody has asked for, at most, with `AROUND` for each."""
AROUND = 1000
Kind = TypeVar("Kind", bound=End | Order | Loaded | Passing | Done | Layout | Answer)


class Exchange:
    """One side's messages. Every call returns at once, and looks what has come."""

    def __init__(self, end: "OrchestratorEnd | RankEnd", heard: Any):
        """With the types of what the other side may say."""
        self.end, self._heard = end, heard
        self._batches: dict[int, StepBatch] = {}
        self._published: dict[int, bytes] = {}
        self._unread = 0
        """Bytes of them."""
        self._newest: dict[type, Message] = {}

    def post(self, message: Message, rank: int = 0) -> None:
        """Send a message: from the orchestrator to a rank, or from a rank."""
        self.end.post(msgspec.msgpack.encode(message), rank)

    def read(self, kind: type[Kind]) -> Kind | None:
        """The newest message of a kind, None where there is none. Raises PrlError for what is none."""
        self.look()
        return cast(Kind | None, self._newest.get(kind))

    def take_batch(self, step: int) -> StepBatch | None:
        """The batch of a step, once. Raises PrlError as `read`."""
        self.look()
        return self._batches.pop(step, None)

    def take_metrics(self, version: int) -> bytes | None:
        """What was published with a version, once. Raises PrlError as `read`."""
        self.look()
        if (metrics := self._published.pop(version, None)) is not None:
            self._unread -= len(metrics) + AROUND
        return metrics

    def look(self) -> None:
        """Take in what has come, have what is on its way pass, and connect again where that is to be done.

        Raises PrlError as `read`, and where the orchestrator never answered.
        """
        for sender, content in self.end.received():
            try:
                message = msgspec.msgpack.decode(content, type=self._heard)
            except UNREADABLE as error:
                raise PrlError(f"{sender} sent what is no message: {error}") from error
            if isinstance(message, Batch):
                self._batches[message.content.step] = message.content
            elif isinstance(message, Published):
                self._published[message.version] = message.metrics
                self._unread += len(message.metrics) + AROUND
                if self._unread > UNREAD:
                    raise PrlError(f"{sender} published {len(self._published)} versions that the run is not at yet")
            else:
                self._newest[type(message)] = message
