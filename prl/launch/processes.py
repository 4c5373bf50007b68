"""One process of a run: its start, its end, and the reason for that in its log."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prl.base.errors import signal_name
from prl.base.files import naming
from prl.launch import children

LOG_TAIL_LINES = 25
LONGEST = 1000
"""Characters of a reason."""
TAIL_BYTES = 8_000_000
"""Each request that a dead engine leaves open has a traceback in the log, after the line that says how it died."""
NOISE = re.compile(
    r"(^|\) |\] )(INFO|DEBUG)\b|resource_tracker|warnings\.warn\(|destroy_process_group|\d%( Completed \||\|)|^[\s^]*$"
)
"""Lines that follow or precede every end."""


Explain = Callable[[Sequence[str]], str]
"""Returns the reason that the last lines of a log give for the end of its process; empty where they give none."""


class Process(subprocess.Popen[bytes]):
    """One command under a supervisor (`prl.launch.children`), which leads its group; its output in `log`."""

    def __init__(
        self,
        name: str,
        command: list[str],
        env: dict[str, str],
        log: Path,
        scratch: Path,
        cwd: Path | None = None,
        explain: Explain | None = None,
        stdin: int = subprocess.DEVNULL,
        may_finish: bool = False,
    ):
        self.name = name
        self.may_finish = may_finish
        """It may end with status 0 while the run goes on."""
        self.explain = explain
        """Finds the reason of its end in the last lines of its log."""
        self.command = command
        self.log = log
        with naming(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("ab")
        with output:
            self.log_start = output.tell()
            """Place in the log where its own output begins."""
            super().__init__(
                [sys.executable, "-P", children.__file__, str(os.getpid()), str(scratch), *self.command],
                stdin=stdin,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": str(scratch), **env},
                cwd=cwd,
                start_new_session=True,
            )

    def tell(self, message: Any) -> None:
        """Write what a process waits for, a line of JSON, to its stdin, which is a pipe and ends with it.

        A line, because a process that an env has forked may hold the pipe open.
        """
        assert self.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.stdin as pipe:  # of one that has ended its status tells
            pipe.write(json.dumps(message).encode() + b"\n")

    @property
    def status(self) -> int | None:
        """The exit status, None while it runs. Does not reap: until `end`, the group's id cannot be reused."""
        if self.returncode is not None:
            return self.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status

    def ask(self) -> None:
        """Ask it to end, if it runs."""
        if self.status is None:
            for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped receives nothing else
                os.killpg(self.pid, number)

    def end(self) -> None:
        """Kill what is left of it, and reap it."""
        if self.returncode is None:  # else it was reaped: the group may be another's by now
            children.end_descendants(self.pid, 0.0)
            os.killpg(self.pid, signal.SIGKILL)  # also what is left where the supervisor was killed
            self.wait()

    def ending(self) -> str:
        """Describe its end: in one line where the log has the reason in one, else with the last lines of the log."""
        assert self.status is not None
        how = f"process {self.name!r} ended with status {self.status}"
        if self.status > 128:
            how += f" ({signal_name(self.status - 128)})"
        lines = self.last_lines()
        own_name, _, reason = lines[-1].partition(": ") if lines else ("", "", "")
        if own_name != self.name.partition(" ")[0]:  # it is not as `prl.trainer.worker` ends
            reason = self.explain(lines) if self.explain is not None else ""
        if reason:
            return f"{how}: {reason[:LONGEST]} (its log: {self.log})"
        return "\n".join([f"{how}; its log: {self.log}", *lines[-LOG_TAIL_LINES:]])

    def last_lines(self) -> list[str]:
        """The last lines of its own output that may tell why it ended; none where the log is gone."""
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(max(self.log_start, self.log.stat().st_size - TAIL_BYTES))
            lines = [line[: 4 * LONGEST] for line in file.read().decode(errors="replace").splitlines()]
            return [line for line in lines if not NOISE.search(line)]
        return []
