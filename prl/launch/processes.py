"""One process of a run: how it is started, what it is doing, how it ended and what it said last."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prl import reaper, standby
from prl.reaper import KILLED, of_signal, stat
from prl.scratch import Scratch
from prl.wire.files import naming

LOG_TAIL_LINES = 25
TAIL_BYTES = 8_000_000
"""Each request that a dead engine leaves open has a traceback in the log, after the line that says how it died."""
NOISE = re.compile(
    r"resource_tracker|leaked|warnings\.warn\(|destroy_process_group|\d+%\|[^|]*\||^\s*$|^\s*\^+\s*$"
    r"|Loading safetensors|Shutting down|Waiting for application shutdown|Application shutdown complete"
    r"|Finished server process|^srun: error: \S+: task \d+: |^slurmstepd\S* error: \*\*\* STEP"
)
"""Lines that never tell why a process ended: they follow every death, or precede it by chance."""
TALK = re.compile(r"(^|\) |\] )(INFO|DEBUG)\b")
"""Lines that are left out where others remain."""
ASKED = re.compile(r"received signal=(SIG[A-Z]+)")
"""What vLLM says when it is asked to end. It ends with status 0 then, as it also does when it fails."""
CORE = re.compile(r"\(EngineCore\b.*\[core\.py:\d+\] (\w+(?:\.\w+)*(?:: .*|Error))$")
"""How vLLM's core says what it ends with, among lines of the traceback; its server then ends with another error."""
CPU_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Process(ABC):
    """A process of a run, wherever it is, and what it leaves to be said of its end."""

    name: str
    command: list[str]
    log: Path
    """Its output."""
    may_finish = False
    """Whether ending with status 0 is expected while the run goes on."""
    where = ""
    """Where it is, in words after its name; empty for this machine."""

    @property
    @abstractmethod
    def status(self) -> int | None:
        """The exit status, None while it runs."""

    @abstractmethod
    def ask(self) -> None:
        """Ask it to end, if it runs."""

    @abstractmethod
    def end(self) -> None:
        """Kill what is left of it."""

    @abstractmethod
    def lines(self) -> list[str]:
        """The last lines of its own output; none where the log is gone."""

    def condition(self) -> "Condition | None":
        """What it is doing; None where that is not known."""
        return None

    def cause(self) -> str:
        """How it ended: its status, and the signal that ended it or the first process inside that one ended."""
        assert self.status is not None
        said = f"process {self.name!r}{self.where} ended with status {self.status}"
        lines = self.lines()
        inside = next((line.partition(KILLED)[2] for line in lines if KILLED in line and " was killed by " in line), "")
        if inside:
            return f"{said}: {inside}"
        if self.status > 128:
            return f"{said} ({of_signal(self.status - 128)})"
        asked = next((found[1] for line in lines if (found := ASKED.search(line))), None)
        return f"{said}: somebody had asked it to end ({asked})" if asked else said

    def ending(self, *, tail: bool = True) -> str:
        """How it ended and why: in its own words where it had some, else with the last lines of its log.

        One line, which says where the log is, without its `tail`.
        """
        words = self.last_words()
        name, _, reason = words.rpartition("\n")[2].partition(": ")
        errors = [found[1] for found in map(CORE.search, self.lines()) if found]
        if errors and self.status == 1:
            return f"{self.cause()}: {errors[-1]} (its log: {self.log})"
        if reason and self.name.partition(" ")[0] == name:  # as `prl.trainer.worker` says it
            return f"{self.cause()}: {reason} (its log: {self.log})"
        if words and not tail:
            return f"{self.cause()}; its log: {self.log}"
        if words:
            return f"{self.cause()}; its last log lines ({self.log}):\n{words}"
        if not self.log.exists():
            return f"{self.cause()}; its log {self.log} is gone"
        full = shutil.disk_usage(self.log.parent).free < os.sysconf("SC_PAGE_SIZE")
        return f"{self.cause()}; its log is empty ({self.log})" + (", for that disk is full: make room" if full else "")

    def last_words(self) -> str:
        """The last lines of its output that may tell why it ended."""
        meant = [line for line in self.lines() if not NOISE.search(line) and not line.startswith(KILLED)]
        louder = [line for line in meant if not TALK.search(line)]
        return "\n".join((louder or meant)[-LOG_TAIL_LINES:])


class Child(subprocess.Popen[bytes], Process):
    """One command under a reaper, which leads its group; its output in `log`."""

    def __init__(
        self, name: str, command: list[str], env: dict[str, str], log: Path, scratch: Scratch, order: Path | None = None
    ):
        """`order` is the file that has a process on standby begin (`prl.standby`); None = it begins at once."""
        self.name = name
        self.command = command
        self.log = log
        self.env = env
        self.order = order
        self.said = log
        """Its output before it begins."""
        with naming(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("ab")
        with output:
            self.log_start = output.tell()
            """Where its own output begins in the log."""
            super().__init__(
                self.arguments(),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self.environment(scratch) | env | ({standby.VARIABLE: str(order)} if order else {}),
                start_new_session=True,
                pass_fds=[scratch.lock],
            )

    def arguments(self) -> list[str]:
        """What is executed: the command under its reaper."""
        return [sys.executable, "-S", "-P", reaper.__file__, *self.command]

    def environment(self, scratch: Scratch) -> dict[str, str]:
        """The environment that `env` is added to."""
        return {**os.environ, **scratch.environment}

    def begin(self, env: Mapping[str, str], log: Path) -> None:
        """Have a process on standby begin, with what `env` has beyond its own, its output in `log`."""
        assert self.order is not None
        with naming(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
            self.log_start = log.stat().st_size
        standby.give_order(self.order, env=dict(env.items() - self.env.items()), log=log, said=self.said)
        self.log = log

    @property
    def status(self) -> int | None:
        """Does not reap: until `end`, the group's id cannot be reused."""
        if self.returncode is not None:
            return self.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status

    def ask(self) -> None:
        if self.status is None:
            for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped hears nothing else
                os.killpg(self.pid, number)

    def end(self) -> None:
        """Kill what is left of it, and reap it."""
        if self.returncode is not None:  # reaped: the group may be another's by now
            return
        with contextlib.suppress(OSError):
            assert self.stdin is not None
            self.stdin.write(b"k")  # the reaper kills all that descends from it
            self.stdin.flush()
        deadline = time.monotonic() + reaper.GRACE_S
        os.killpg(self.pid, signal.SIGCONT)
        while self.status is None and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(self.pid, signal.SIGKILL)
        self.communicate()  # closes the pipe and reaps

    def lines(self) -> list[str]:
        if self.order is not None and self.order.exists() and self.status is not None:  # it ended on standby
            with contextlib.suppress(OSError), self.log.open("ab") as log:
                log.write(self.said.read_bytes())
            self.order.unlink()
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(max(self.log_start, self.log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").strip().splitlines()
        return []

    def condition(self) -> "Condition | None":
        return condition(self.name, reaper.descendants(self.pid))


@dataclass(frozen=True)
class Condition:
    """What a process of the run and those below it are doing."""

    name: str
    stopped: str | None
    """The one that is stopped (state T), by name and id; None = none is."""
    cpu_s: float
    """CPU time so far, seconds."""
    running: bool
    """Whether one is on a CPU, or waits for one or for a disk."""

    @property
    def role(self) -> str:
        """Its name without its rank: `trainer` of each rank of the trainer."""
        return self.name.partition(" rank ")[0]


def condition(name: str, pids: Iterable[int]) -> Condition:
    """What the processes `pids` are doing now, as one of that name. A process's reaper does not count."""
    members = {pid: fields for pid in sorted(pids) if (fields := stat(pid))}
    stopped = [pid for pid, fields in members.items() if fields[0] == "T"]
    return Condition(
        name=name,
        stopped=f"{reaper.command_of(stopped[0])}, process {stopped[0]}" if stopped else None,
        cpu_s=sum(int(fields[11]) + int(fields[12]) for fields in members.values()) * CPU_S,
        running=any(fields[0] in "RD" for fields in members.values()),
    )
