"""Join a node to a run with `launcher=external`, whose launcher prints this command.

    python -m prl.launch.join <run directory, or the external/invitation.json in it>

It starts what the launcher says, under a reaper each, and ends all of it when the launcher is gone or it is ended
itself. The node needs the interpreter, prl, the model and the run's directory at the same paths as the launcher.
"""

import signal
import sys
import time
from pathlib import Path

from prl.config.gpus import Place
from prl.errors import PrlError
from prl.launch.channel import (
    Admitted,
    Ask,
    End,
    Ended,
    Leave,
    NodeEnd,
    Refused,
    Start,
    own_report,
)
from prl.launch.external import FOLDER, INVITATION
from prl.launch.local import LocalLauncher
from prl.launch.processes import Process
from prl.text import safe
from prl.wire.curve import Invitation

ANSWER_S = 30.0
"""Deadline for the launcher to answer a node's report, seconds."""
POLL_S = 0.05
LINES, WIDTH = 200, 1000
"""Of the output of a process that has ended: how many lines are reported, and how long ones."""


def main(arguments: list[str]) -> int:
    """Join, work, and leave. Returns the exit status; raises PrlError where it cannot join or the launcher is gone."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__, end="")
        return 0
    if len(arguments) != 1:
        sys.exit("usage: python -m prl.launch.join <run directory, or the external/invitation.json in it>")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    path = Path(arguments[0])
    invitation = Invitation.read(path / FOLDER / INVITATION if path.is_dir() else path)
    end = NodeEnd(invitation)
    try:
        print(f"joined the run in {join(end, invitation.token)}", file=sys.stderr, flush=True)
        try:
            with LocalLauncher() as launcher:
                work(end, launcher)
        except PrlError as error:
            raise PrlError(f"{error}: what it had started here has ended") from error
        print("the run has ended", file=sys.stderr)
        return 0
    except KeyboardInterrupt:
        print("this node has left, and what ran here has ended", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        end.close()


def join(end: NodeEnd, token: str) -> str:
    """Report to the launcher; returns the run's directory. Raises PrlError where it refuses, or does not answer."""
    end.send(own_report(token))
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        message = end.receive(POLL_S)
        if isinstance(message, Refused):
            raise PrlError(f"the launcher refuses this node: {safe(message.reason)}")
        if isinstance(message, Admitted):
            return safe(message.run_dir)
    raise PrlError(f"the launcher at {end.address} did not answer within {ANSWER_S:g} s")


def work(end: NodeEnd, launcher: LocalLauncher) -> None:
    """Do what the launcher says, and report what ends, until the run does. Raises PrlError where it is gone."""
    running: dict[int, Process] = {}
    while not isinstance(message := end.receive(POLL_S), Leave):
        if isinstance(message, Start):
            try:
                running[message.process] = begin(message, launcher)
            except (OSError, PrlError) as error:
                end.send(Ended(message.process, 1, [f"it cannot be started: {error}"]))
        elif isinstance(message, Ask | End) and (process := running.get(message.process)) is not None:
            process.ask() if isinstance(message, Ask) else process.end()
        for number, process in list(running.items()):
            if (status := process.status) is not None:
                process.end()
                lines = [line[:WIDTH] for line in process.lines()[-LINES:]]
                end.send(Ended(number, status if status >= 0 else 128 - status, lines))
                launcher.processes.remove(running.pop(number))


def begin(order: Start, launcher: LocalLauncher) -> Process:
    """Start a process. Raises PrlError and OSError."""
    place = Place(gpus=tuple(order.gpus))
    return launcher.start(order.name, order.command, env=order.env, log=Path(order.log), place=place)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PrlError as error:
        sys.exit(f"error: {error}")
