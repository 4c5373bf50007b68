"""What orchestrator and trainer ranks send each other arrives in order and once, over connections that may break.

Each side cuts its messages into pieces, numbers them, and keeps each until the other has it. A connection that ended
is made anew by the rank, and each side goes on after the last piece that the other has: nothing is lost, and nothing
comes twice. So a slow network, a machine that sleeps for a while, or a process that is stopped, costs no run. A rank
has one session for its life: another process that says it were that rank is not heard, nor is one of another run, whose
key is another.
"""

import hmac
import logging
import math
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from prl.errors import UNREADABLE, PrlError
from prl.text import safe
from prl.wire.curve import LINGER_MS, Invitation, connect, listen

log = logging.getLogger(__name__)

PIECE = 256 << 10
"""What passes at once, bytes: 3 s at 100 KB/s. Heartbeats wait for the piece before them, and a side that gets neither
for `curve.SILENT_S` takes the other for gone."""
FRAME = PIECE + (4 << 10)
"""Of a piece with what is around it, at most, bytes."""
LARGEST = 64 << 20
"""Of a message from a rank, bytes: room for the names and shapes of a million tensors."""
AT_ONCE = 256
"""Pieces that the orchestrator takes in one look, so that ranks that send without an end do not hold it."""
ANSWER_S = 60.0
"""Deadline for the orchestrator to answer a rank for the first time, from when the rank begins to connect, seconds."""
RETRY_S = 1.0
"""Between two attempts to connect again, seconds."""


class Hello(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A rank has connected."""

    token: str
    rank: int
    session: str
    """The same for all connections of a process."""
    received: int
    """The number of the last piece that it has."""


class Envelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """All that passes but for that."""

    number: int
    """0: nothing but that `received` are here."""
    received: int
    content: bytes = b""
    more: bool = False
    """Whether the message goes on in the next piece."""


class Session:
    """One side of what passes between the orchestrator and one rank."""

    def __init__(self, other: str, largest: float = math.inf):
        self.other, self.largest = other, largest
        """The other side's name, and the most bytes of a message from there."""
        self.kept: deque[tuple[int, bytes, bool]] = deque()
        """The pieces that the other side may not have yet: number, content, and whether the message goes on."""
        self.posted = self.sent = self.received = self.told = 0
        """The numbers of the last piece, of the last given to the connection, of the last from the other side, and of
        the last that this was told of."""
        self.begun = bytearray()
        """What is here of a message that has not come as a whole."""

    def post(self, content: bytes) -> None:
        """Keep a message until the other side has it."""
        for start in range(0, max(1, len(content)), PIECE):
            self.posted += 1
            self.kept.append((self.posted, content[start : start + PIECE], start + PIECE < len(content)))

    def flush(self, send: Callable[[bytes], bool]) -> None:
        """Send what the connection has not been given, as far as it takes it, and what has come since the last time."""
        for number, content, more in self.kept:
            if number > self.sent:
                if not send(self.envelope(number, content, more)):
                    return
                self.sent, self.told = number, self.received
        if self.told < self.received and send(self.envelope()):
            self.told = self.received

    def envelope(self, number: int = 0, content: bytes = b"", more: bool = False) -> bytes:
        """A piece as it is sent; without one what acknowledges those of the other side."""
        return msgspec.msgpack.encode(Envelope(number, self.received, content, more))

    def take(self, data: bytes) -> bytes | None:
        """Note what came. Returns the message that it completes, None where it completes none that was not here yet.

        Raises PrlError for what the other side may not send.
        """
        try:
            envelope = msgspec.msgpack.decode(data, type=Envelope)
        except UNREADABLE as error:
            raise PrlError(f"{self.other} sent what is no message: {error}") from error
        while self.kept and self.kept[0][0] <= envelope.received:
            self.kept.popleft()
        if envelope.number <= self.received:
            return None
        if envelope.number > self.received + 1:
            raise PrlError(f"piece {self.received + 1} of what {self.other} sent is missing")
        self.received = envelope.number
        self.begun += envelope.content
        if len(self.begun) > self.largest:
            raise PrlError(f"{self.other} sent a message of more than {self.largest} bytes")
        if envelope.more:
            return None
        whole, self.begun = bytes(self.begun), bytearray()
        return whole


class OrchestratorEnd:
    """The orchestrator's end of all sessions. Not for several threads at once; every call returns at once."""

    def __init__(self, host: str, ranks: int):
        """Listen. Raises PrlError where that cannot be done."""
        self.context = zmq.Context()
        try:
            self.socket, self.invitation = listen(self.context, host, largest=FRAME)
        except (OSError, UnicodeError, zmq.ZMQError) as error:
            self.close()
            raise PrlError(f"the orchestrator cannot listen at {host} for the trainer's ranks: {error}") from error
        self.sessions = [Session(f"rank {rank} of the trainer", LARGEST) for rank in range(ranks)]
        self.named: dict[int, str] = {}
        """The session of each rank that has come."""
        self.peers: dict[bytes, int] = {}
        """Ranks by their connections."""

    def post(self, content: bytes, rank: int) -> None:
        """Send a rank a message, now or once it is connected."""
        self.sessions[rank].post(content)
        self._flush()

    def received(self) -> list[tuple[str, bytes]]:
        """What has come since, and from whom; what is no rank's is dropped. Raises PrlError for what a rank may not."""
        found: list[tuple[str, bytes]] = []
        for _ in range(AT_ONCE):
            if (frames := self._next()) is None:
                break
            peer, data = frames[0].bytes, b"".join(frame.bytes for frame in frames[1:])
            if (rank := self.peers.get(peer)) is None:
                self._admit(peer, data, str(frames[-1].get("Peer-Address")))
            elif (content := self.sessions[rank].take(data)) is not None:
                found.append((self.sessions[rank].other, content))
        self._flush()
        return found

    def close(self) -> None:
        """Close all connections, once what was sent has left, or soon."""
        self.context.destroy(LINGER_MS)

    def _next(self) -> "list[zmq.Frame] | None":
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def _admit(self, peer: bytes, data: bytes, address: str) -> None:
        """Have a connection be that of a rank, in place of the one before."""
        try:
            hello = msgspec.msgpack.decode(data, type=Hello)
        except UNREADABLE:
            return
        if not hmac.compare_digest(hello.token.encode(), self.invitation.token.encode()):
            reason = "its token is not that of this run"
        elif not 0 <= hello.rank < len(self.sessions):
            reason = f"there is no rank {hello.rank}"
        elif self.named.setdefault(hello.rank, hello.session) != hello.session:
            reason = f"rank {hello.rank} has connected already"
        else:
            for before in [each for each, rank in self.peers.items() if rank == hello.rank]:
                del self.peers[before]
            self.peers[peer] = hello.rank
            session = self.sessions[hello.rank]
            session.sent = hello.received
            self._send(peer, session.envelope())  # also where there is nothing else to say
            return
        log.warning("a connection from %s is not heard: %s", safe(address), reason)

    def _flush(self) -> None:
        for peer, rank in list(self.peers.items()):
            self.sessions[rank].flush(lambda data, peer=peer: self._send(peer, data))  # type: ignore[misc]

    def _send(self, peer: bytes, data: bytes) -> bool:
        """Returns whether the connection has taken it."""
        try:
            self.socket.send_multipart([peer, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self.peers.pop(peer, None)
            return False
        return True


class RankEnd:
    """A rank's end of its session. Not for several threads at once; every call returns at once."""

    def __init__(self, invitation: Invitation, rank: int):
        """Begin to connect. Raises PrlError for an address that is none."""
        self.invitation, self.rank = invitation, rank
        self.session, self.name = Session("the orchestrator"), secrets.token_hex(8)
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] | None = None
        self.answered = False
        """Whether the orchestrator has answered on the connection that there is."""
        self.again_at = 0.0
        """When to connect again, where there is none."""
        self.give_up_at = time.monotonic() + ANSWER_S
        """Deadline for the first answer; infinite once there was one."""
        self._connect()

    def post(self, content: bytes, _: int = 0) -> None:
        """Send the orchestrator a message, now or once that is possible. Raises PrlError for one that is too large."""
        if len(content) > LARGEST:
            said = f"rank {self.rank} has a message of {len(content)} bytes for the orchestrator, which takes {LARGEST}"
            raise PrlError(f"{said}: has the trainer millions of metrics, or the model as many tensors?")
        self.session.post(content)
        self._flush()

    def received(self) -> list[tuple[str, bytes]]:
        """What has come since, and from whom. Raises PrlError where the orchestrator never answered, or badly."""
        found: list[tuple[str, bytes]] = []
        while (data := self._next()) is not None:
            if not self.answered:
                self.answered, self.give_up_at = True, math.inf
                self.session.sent = 0  # this connection has been given nothing
            if (content := self.session.take(data)) is not None:
                found.append((self.session.other, content))
        self._mend()
        self._flush()
        return found

    def close(self) -> None:
        """Close the connection, once what was sent has left, or soon."""
        self.context.destroy(LINGER_MS)

    def _connect(self) -> None:
        try:
            self.socket, self.monitor = connect(self.context, self.invitation, largest=FRAME)
        except (ValueError, zmq.ZMQError) as error:
            self.close()
            raise PrlError(f"{self.invitation.address} cannot be connected to: {error}") from error
        hello = Hello(self.invitation.token, self.rank, self.name, self.session.received)
        self._send(msgspec.msgpack.encode(hello))

    def _mend(self) -> None:
        """Connect again where the connection has ended. Raises PrlError where there never was one in time."""
        now = time.monotonic()
        if self.socket is not None and self.monitor.poll(0):
            self.hang_up()
        if self.socket is None and now >= self.again_at:
            self._connect()
        if now > self.give_up_at:
            raise PrlError(
                f"the orchestrator at {self.invitation.address} did not answer rank {self.rank} within {ANSWER_S:g} s: "
                "can this machine reach that address (launcher.interface)?"
            )

    def hang_up(self) -> None:
        """End the connection; `received` makes another one, soon."""
        if self.socket is None:
            return
        if self.answered:
            said = f"the connection to the orchestrator at {self.invitation.address} has ended, and is made again"
            print(safe(said), file=sys.stderr, flush=True)
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
        self.socket, self.answered, self.again_at = None, False, time.monotonic() + RETRY_S

    def _next(self) -> bytes | None:
        try:
            return None if self.socket is None else self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _flush(self) -> None:
        if self.answered:
            self.session.flush(self._send)

    def _send(self, data: bytes) -> bool:
        """Returns whether the connection has taken it."""
        try:
            assert self.socket is not None
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
