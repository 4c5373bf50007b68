"""TCP sockets of ZeroMQ's for those who were invited, which CURVE encrypts.

Either side has to know the other, and both do from the invitation: one talks only to whoever has the secret to the
public key there, the other listens only to whoever shows the token there. ZeroMQ's own threads exchange heartbeats,
also while Python is busy. It connects once: what becomes of a connection that ends, its owner decides.
"""

import secrets
import socket
from typing import Any

import msgspec
import zmq

SILENT_S = 30.0
"""By then a side that does not answer a heartbeat counts as gone, seconds."""
LINGER_MS = 1000
FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
OVER = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILED
"""Events after which a connection is no more."""


class Invitation(msgspec.Struct, forbid_unknown_fields=True):
    """What one needs to connect."""

    address: str
    """As ZeroMQ has it: tcp://host:port."""
    key: str
    """Public key of who listens there."""
    token: str


def listen(context: "zmq.Context[Any]", host: str, *, largest: int) -> tuple["zmq.Socket[bytes]", Invitation]:
    """A ROUTER that listens at a free port, and the invitation to it.

    Args:
        context: what it belongs to.
        host: name or address of this machine.
        largest: of a message that is received, bytes.

    Raises:
        OSError, UnicodeError, zmq.ZMQError: That cannot be done.
    """
    end = context.socket(zmq.ROUTER)
    public, secret = zmq.curve_keypair()
    end.curve_server, end.curve_secretkey = 1, secret
    end.router_mandatory = 1  # else what is sent to a peer that is gone vanishes
    numeric = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    _set_up(end, ":" in numeric, largest)
    end.bind(f"tcp://{bracketed(numeric)}:*")
    number = end.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return end, Invitation(f"tcp://{bracketed(numeric)}:{number}", public.decode(), secrets.token_hex(24))


def connect(
    context: "zmq.Context[Any]", invitation: Invitation, *, largest: int
) -> tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]:
    """A DEALER that begins to connect, once, and a socket that has an event of `OVER` where that is no more.

    Args:
        context: what both belong to.
        invitation: to where.
        largest: of a message that is received, bytes.

    Raises:
        ValueError, zmq.ZMQError: It is no address, or no key.
    """
    end = context.socket(zmq.DEALER)
    end.curve_serverkey = invitation.key.encode()
    end.curve_publickey, end.curve_secretkey = zmq.curve_keypair()
    end.reconnect_ivl, end.connect_timeout = -1, int(SILENT_S * 1000)
    _set_up(end, "[" in invitation.address, largest)
    monitor = end.get_monitor_socket(OVER)
    end.connect(invitation.address)
    return end, monitor


def _set_up(end: "zmq.Socket[bytes]", six: bool, largest: int) -> None:
    """What both ends have: heartbeats, limits to what is received and how long an end takes, IPv6 where it is used."""
    end.ipv6, end.maxmsgsize, end.linger = six, largest, LINGER_MS
    end.heartbeat_ivl, end.heartbeat_timeout = int(SILENT_S * 1000) // 6, int(SILENT_S * 1000)


def bracketed(address: str) -> str:
    """An address as URLs have it."""
    return f"[{address}]" if ":" in address else address
