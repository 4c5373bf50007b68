"""The launcher for machines without a scheduler: it says which command joins a node to the run, and waits for all.

The first node is that of the launcher, as `local` has it. On each other a person gives the command (`join.py`), which
starts there what it is told over an encrypted channel (`channel.py`), each process under a reaper of its own.
"""

import hmac
import os
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Le

from prl import reaper
from prl.config.gpus import Place
from prl.config.machine import interfaces, lacks_interface
from prl.config.signature import Seconds
from prl.errors import ConfigError, PrlError
from prl.launch.launcher import EngineSpec, TrainerSpec
from prl.launch.local import free_port
from prl.launch.nodes import NodesLauncher
from prl.launch.processes import Process
from prl.text import safe

if TYPE_CHECKING:  # it takes ZeroMQ, which no other launcher needs
    from prl.launch.channel import Ended, Join, LauncherEnd, ToNode

FOLDER = "external"
INVITATION = "invitation.json"
LOST = 255
"""Status of a process whose node is gone."""
POLL_S = 0.05
SHOWN = 200
"""Characters of what a node says of itself, at most."""


@dataclass(eq=False)
class Node:
    """A node that has joined."""

    peer: bytes
    """Its connection."""
    host: str
    """What it calls itself."""
    address: str
    """Where its engines are reached: it reports from there."""
    lost: bool = False


@dataclass(kw_only=True)
class ExternalLauncher(NodesLauncher):
    """Prints the command that joins a further node to the run, and waits until all have (`prl.launch.join`)."""

    FOLDER: ClassVar[str] = FOLDER
    nodes: Annotated[int, Ge(2)] = 2
    """Nodes, this one included. Engines are from here on, ranks of the trainer on all."""
    host: str = "127.0.0.1"
    """Address of this machine at which the other nodes report. The default is for nodes that are this machine too."""
    port: Annotated[int, Ge(1), Le(65535)] | None = None
    """Port there; null = a free one."""
    join_timeout_s: Seconds = 600.0
    """Deadline for all nodes to report, seconds."""
    channel: "LauncherEnd | None" = field(default=None, init=False, repr=False)
    """From `gather` to `stop`."""
    joined: list[Node] = field(default_factory=list, init=False, repr=False)
    """The nodes after the first."""
    invitation: Path | None = field(default=None, init=False, repr=False)
    remote: "dict[int, Remote]" = field(default_factory=dict, init=False, repr=False)
    """The processes on other nodes, by number."""
    lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)
    """Of the channel: an engine is started again in another thread."""

    def check(self, where: str) -> None:
        super().check(where)
        if lacks_interface(self.interface, there := interfaces()):
            those = f"the interfaces of this machine that have an address are {', '.join(there)}"
            raise ConfigError(f"{where}.interface={self.interface}: {those}")

    def import_ahead(self, engines: Sequence[EngineSpec], trainer: TrainerSpec | None) -> None:
        free_port(self.host, self.port)  # said at once, not after all has been prepared
        super().import_ahead(engines, trainer)

    # --- nodes ---

    def gather(self, run_dir: Path) -> None:
        from prl.launch.channel import LauncherEnd

        self.channel = LauncherEnd(self.host, self.port)
        self.invitation = run_dir.resolve() / FOLDER / INVITATION
        self.channel.invitation.write(self.invitation)
        self._say_how(run_dir)
        began = time.monotonic()
        while len(self.joined) < self.nodes - 1:
            if time.monotonic() - began > self.join_timeout_s:
                there = [f"node {number} is {node.host}" for number, node in enumerate(self.joined, 2)]
                missing = ", ".join(str(number) for number in range(2 + len(there), self.nodes + 1))
                raise PrlError(
                    f"launcher.nodes={self.nodes}: node {missing} had not reported after {self.join_timeout_s:g} s "
                    f"(launcher.join_timeout_s){''.join(f'; {each}' for each in there)}. Give the command in time, "
                    f"where launcher.host={self.host} can be reached"
                )
            self.listen(beat=True)
            for node in [node for node in self.joined if node.lost]:
                print(f"node {node.host} ({node.address}) is gone again", file=sys.stderr, flush=True)
                self.joined.remove(node)
            time.sleep(POLL_S)

    def _say_how(self, run_dir: Path) -> None:
        assert self.channel is not None and self.invitation is not None
        given = os.environ.get("PYTHONPATH")  # prl itself, or the user's modules, may be found by it alone
        search = os.pathsep.join(map(os.path.abspath, given.split(os.pathsep))) if given else None
        words = [*(["env", f"PYTHONPATH={search}"] if search else []), sys.executable, "-m", "prl.launch.join"]
        words.append(str(self.invitation))
        loopback = self.host in ("127.0.0.1", "localhost", "::1")
        for line in (
            f"give this command on each of {self.nodes - 1} other node(s), within {self.join_timeout_s:g} s:",
            f"    cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}",
            f"they report at {self.channel.invitation.address}"
            + (", which this machine alone reaches: launcher.host=<its address> is for others" if loopback else ""),
            f"each must see {run_dir.resolve()}, the model and prl at the same paths",
        ):
            print(line, file=sys.stderr, flush=True)

    def listen(self, *, beat: bool = False) -> None:
        """Take in what nodes have sent and, with `beat`, look which are gone."""
        with self.lock:
            if self.channel is None:
                return
            from prl.launch.channel import Beat, Join

            for peer, address, content in self.channel.received():
                if isinstance(content, Join):
                    self._admit(peer, address, content)
                elif (process := self.remote.get(content.process)) and process.node.peer == peer:
                    process.ended = content
            for node in self.joined if beat else ():
                self.tell(node, Beat())

    def tell(self, node: Node, message: "ToNode") -> None:
        """Send a node a message; where it is gone, note that."""
        with self.lock:
            if not node.lost and self.channel is not None and not self.channel.send(node.peer, message):
                node.lost = True

    def _admit(self, peer: bytes, address: str, join: "Join") -> None:
        """Take a node in, or tell it why not."""
        assert self.channel is not None and self.invitation is not None
        from prl.launch.channel import Admitted, Refused, versions

        mine, host = versions(), shown(join.host)
        other = [f"{name} {shown(join.versions.get(name, 'none'))} there, {own} here" for name, own in mine.items()]
        differing = [said for said, name in zip(other, mine, strict=True) if join.versions.get(name) != mine[name]]
        reason = ""
        if not hmac.compare_digest(join.token.encode(), self.channel.invitation.token.encode()):
            reason = "its token is not that of this run"
        elif any(node.peer == peer for node in self.joined):
            reason = "it has joined already"
        elif len(self.joined) == self.nodes - 1:
            reason = f"the run has its launcher.nodes={self.nodes} nodes already"
        elif differing:
            reason = f"all nodes need the same versions: {'; '.join(differing)}"
        elif join.gpus < self.gpus_per_node:
            reason = f"launcher.gpus_per_node={self.gpus_per_node}, and it has {join.gpus}"
        elif lacks_interface(self.interface, join.interfaces):
            those = shown(", ".join(join.interfaces))
            reason = f"launcher.interface={self.interface}, and its interfaces that have an address are {those}"
        said = f"node {host} ({address})"
        if reason:
            self.channel.send(peer, Refused(reason))
            print(f"{said} is refused: {reason}", file=sys.stderr, flush=True)
            return
        self.joined.append(Node(peer, host, address))
        self.channel.send(peer, Admitted(str(self.invitation.parents[1])))
        has = f"{join.cores} cores, {join.gpus} GPUs"
        print(f"{said} has joined: {has}; {len(self.joined)} of {self.nodes - 1}", file=sys.stderr, flush=True)

    # --- processes ---

    def address(self, node: int) -> str:
        from prl.wire.curve import bracketed

        return bracketed(self.joined[node - 1].address)

    def elsewhere(self, place: Place, name: str, command: list[str], env: dict[str, str], log: Path) -> Process:
        from prl.launch.channel import Start

        if self.channel is None:
            raise ConfigError("launcher=external is for prl train, without sweep.share_engine: choose launcher=local")
        node, number = self.joined[place.node - 1], len(self.remote)
        process = self.remote[number] = Remote(self, place.node, number, name, command, log.resolve())
        self.tell(node, Start(number, name, command, env, list(place.gpus), str(process.log)))
        return process

    def restart_engine(self, name: str) -> bool:
        node = self.engines[name][0].place.node if name in self.engines else 0
        return not (node and self.joined[node - 1].lost) and super().restart_engine(name)

    def ensure_alive(self) -> None:
        self.listen(beat=True)
        super().ensure_alive()

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self._dismiss()

    def _dismiss(self) -> None:
        """Have the nodes end, and wait until they have: one that has yet to read that would be told of a loss."""
        with self.lock:
            if self.channel is None:
                return
            from prl.launch.channel import Beat, Leave

            for node in self.joined:
                self.tell(node, Leave())
            deadline = time.monotonic() + reaper.GRACE_S
            while not all(node.lost for node in self.joined) and time.monotonic() < deadline:
                time.sleep(POLL_S)
                for node in self.joined:
                    self.tell(node, Beat())
            self.channel.close()
            self.channel = None
        if self.invitation is not None:
            self.invitation.unlink(missing_ok=True)


def shown(text: str) -> str:
    """What a node says of itself, in one line for a person; anybody may have said it."""
    return safe(" ".join(text[:SHOWN].split()))


class Remote(Process):
    """A process on another node."""

    def __init__(self, launcher: ExternalLauncher, place: int, number: int, name: str, command: list[str], log: Path):
        self.launcher, self.number, self.node = launcher, number, launcher.joined[place - 1]
        self.name, self.command, self.log = name, command, log
        self.where = f" on node {place + 1} ({self.node.host})"
        self.ended: Ended | None = None

    @property
    def status(self) -> int | None:
        self.launcher.listen()
        if self.ended is not None:
            return self.ended.status
        return LOST if self.node.lost or self.launcher.channel is None else None

    def ask(self) -> None:
        from prl.launch.channel import Ask

        if self.status is None:
            self.launcher.tell(self.node, Ask(self.number))

    def end(self) -> None:
        from prl.launch.channel import End

        deadline = time.monotonic() + 2 * reaper.GRACE_S
        if self.status is None:
            self.launcher.tell(self.node, End(self.number))
        while self.status is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def lines(self) -> list[str]:
        return [] if self.ended is None else self.ended.lines

    def cause(self) -> str:
        if self.ended is not None:
            return super().cause()
        return f"node{self.where.removeprefix(' on node')} is gone, and with it process {self.name!r}"

    def ending(self, *, tail: bool = True) -> str:
        if self.ended is not None:
            return super().ending(tail=tail)
        return (
            f"{self.cause()}: the command there was ended, or that machine is down or not reached (the process's log: "
            f"{self.log})"
        )
