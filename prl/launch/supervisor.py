"""The processes of a run beside the launcher's own: start them, notice when one dies, leave none behind."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from prl import reaper
from prl.errors import PrlError

POLL_S = 0.1
LOG_TAIL_LINES = 25


class ProcessDied(PrlError):
    """A process of the run ended before the run did."""


class Process:
    """One command under a reaper, its output in `log`."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path):
        self.name = name
        self.log = log
        self.may_finish = False
        """Whether ending with status 0 is expected while the run goes on."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._reaper = subprocess.Popen(
                [sys.executable, "-S", reaper.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **env},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Id of the process that leads its group."""
        return self._reaper.pid

    @property
    def status(self) -> int | None:
        """The exit status, None while it runs. Does not reap: until `stop`, the group's id cannot be reused."""
        if self._reaper.returncode is not None:
            return self._reaper.returncode
        ended = os.waitid(os.P_PID, self._reaper.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def ask_to_stop(self) -> None:
        if self.status is None:
            os.killpg(self._reaper.pid, signal.SIGTERM)

    def stop(self, deadline: float) -> None:
        """Wait for the end until `deadline` (monotonic seconds), then end the whole group."""
        while self.status is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._reaper.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._reaper.pid, signal.SIGKILL)
            self._reaper.wait()
        if self._reaper.stdin is not None:
            self._reaper.stdin.close()


class Supervisor:
    """The run's processes. A context manager: leaving it stops all of them."""

    def __init__(self):
        self.processes: list[Process] = []

    def start(self, name: str, command: list[str], *, env: dict[str, str], log: Path) -> Process:
        process = Process(name, command, env, log)
        self.processes.append(process)
        return process

    def ensure_alive(self) -> None:
        """Raise ProcessDied if a process has ended."""
        for process in self.processes:
            status = process.status
            if status is not None and not (status == 0 and process.may_finish):
                raise ProcessDied(
                    f"process {process.name!r} ended with status {status}; its last log lines "
                    f"({process.log}):\n{process.tail()}"
                )

    async def watch(self) -> None:
        """Run until a process ends, and raise ProcessDied then."""
        while True:
            self.ensure_alive()
            await asyncio.sleep(POLL_S)

    async def finish(self, timeout_s: float) -> None:
        """Wait for the processes that end by themselves. PrlError names one that fails or takes too long."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            while process.may_finish and process.status is None:
                self.ensure_alive()
                if time.monotonic() > deadline:
                    raise PrlError(
                        f"process {process.name!r} had not ended {timeout_s:g} s after the last step ({process.log})"
                    )
                await asyncio.sleep(0.02)
        self.ensure_alive()

    def stop(self) -> None:
        """Ask every process to stop, and end those that have not after the time of grace."""
        for process in self.processes:
            process.ask_to_stop()
        deadline = time.monotonic() + reaper.GRACE_S
        for process in self.processes:
            process.stop(deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_port(host: str, port: int | None = None) -> int:
    """A TCP port nobody listens on now: `port` if it is given. Raises PrlError where that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT can be had
        try:
            sock.bind((host, port or 0))
        except OSError as error:
            raise PrlError(f"cannot listen on {host}, port {port or 'any'}: {error.strerror or error}") from error
        return sock.getsockname()[1]
