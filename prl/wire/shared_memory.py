"""Peers that have the same buffers: all on one machine, and on one GPU where their tensors are on GPUs.

The sender makes two buffers, and fills one while the others load the tensors of the other one from where they are. Each
has a Unix socket to the sender, and says by a byte that a bucket is filled, or that it has loaded it. Nobody polls; the
sockets' locks have the numbers arrive before the byte, also on processors that reorder writes; and the kernel says at
once that a peer has died. Sockets are found in a folder that is the user's alone, and nameless once the peers have met.
"""

import contextlib
import socket
import tempfile
from collections.abc import Sequence

import torch

from prl.text import in_one_line
from prl.wire import shared_buffers
from prl.wire.buckets import Place, of_two
from prl.wire.peers import LOOK_S, Peers, TransferFailed, Wait

LONGEST = 2**16
"""Bytes of a message."""


class Link:
    """A connection between the sender and a peer."""

    def __init__(self, connection: socket.socket, name: str):
        """
        Args:
            connection: Keeps messages apart.
            name: The other one's, for messages.
        """
        connection.settimeout(LOOK_S)
        self.connection, self.name = connection, name
        self.passed = 0
        """Buckets that the other one has filled, or loaded."""

    def say(self, message: bytes, files: Sequence[int] = ()) -> None:
        """Send a message with open files. Raises TransferFailed."""
        try:
            socket.send_fds(self.connection, [message], list(files))
        except OSError as error:
            raise TransferFailed(f"weights did not pass: {self.name} is gone") from error

    def hear(self, wait: Wait, missing: str) -> tuple[bytes, list[int]]:
        """The next message, and files that come with it. Raises TransferFailed."""
        while True:
            try:
                message, files, *_ = socket.recv_fds(self.connection, LONGEST, 1)
            except TimeoutError:
                wait.look(f"{self.name} {missing}")
                continue
            except OSError:
                message = b""
            if message:
                return message, files
            wait.look_off()  # which is why it is gone, then
            raise TransferFailed(f"weights did not pass: {self.name} is gone")

    def close(self) -> None:
        self.connection.close()


class Door:
    """Where the sender is found by peers of this machine until they have met."""

    def __init__(self, peers: int):
        """Open for so many."""
        self.path = ""
        """Empty: nobody can come, since a socket's path would be too long, or there are no such sockets."""
        self._open = contextlib.ExitStack()
        with contextlib.suppress(OSError):
            path = self._open.enter_context(tempfile.TemporaryDirectory(prefix="prl-peers-")) + "/door"
            self._socket = self._open.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._socket.bind(path)
            self._socket.listen(peers)
            self.path = path

    def enter(self) -> Link:
        """The connection of a peer that has come. Raises OSError."""
        connection, _ = self._socket.accept()
        connection.settimeout(LOOK_S)
        return Link(connection, connection.recv(LONGEST).decode())

    def close(self) -> None:
        self._open.close()


def link_to(path: str, name: str, sender: str) -> Link | None:
    """The connection of the peer called `name` to the sender's door; None where that is on another machine."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(path)
        connection.send(name.encode())
        return Link(connection, sender)
    except OSError:
        connection.close()
        return None


class Shared(Peers):
    """Peers that have the sender's buffers."""

    def __init__(self, links: Sequence[Link], *, sends: bool, store: str, device: torch.device, timeout_s: float):
        """
        Args:
            links: To all others of the sender, or from another to it.
            sends: Whether this is the sender.
            store: Where they have met.
            device: Where the buffers are.
            timeout_s: Deadline for each bucket to pass, seconds.
        """
        super().__init__(store, device=device, timeout_s=timeout_s)
        self._links, self._sends = links, sends
        self._buffers: list[torch.Tensor] = []
        self._begun = 0

    def buffers(self, cut: Sequence[Sequence[Place]]) -> list[torch.Tensor]:
        sizes = of_two(cut)
        try:
            if not self._buffers:
                self._buffers = self._made(sizes) if self._sends else self._given()
        except (OSError, RuntimeError, ValueError) as error:
            hint = " (PYTORCH_ALLOC_CONF, without expandable_segments?)" if self.device.type == "cuda" else ""
            raise TransferFailed(f"weights cannot be shared: {in_one_line(error)}{hint}") from error
        if (found := tuple(map(len, self._buffers))) != sizes:
            raise TransferFailed(f"the peers have buffers of {found} bytes, and the weights need {sizes}")
        return self._buffers

    def _made(self, sizes: tuple[int, ...]) -> list[torch.Tensor]:
        return shared_buffers.share(sizes, self.device, [link.say for link in self._links])

    def _given(self) -> list[torch.Tensor]:
        wait = Wait(self.store, self.timeout_s, "for weights to pass")
        message, files = self._links[0].hear(wait, "has given no buffers")
        return shared_buffers.opened(message, files, self.device)

    def broadcast(self, packed: torch.Tensor) -> int:
        if self._sends:
            self._say()
        self._begun += 1
        return self._begun

    def wait(self, work: int) -> None:
        wait = Wait(self.store, self.timeout_s, "for weights to pass")
        for link in self._links:
            while link.passed < work:
                link.hear(wait, "has not loaded a bucket" if self._sends else "has not filled a bucket")
                link.passed += 1

    def let_go(self, work: int) -> None:
        self._say()

    def _say(self) -> None:
        """Tell the other side that this one is done with a bucket."""
        shared_buffers.settle(self.device)
        for link in self._links:
            link.say(b".")

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._buffers = []
