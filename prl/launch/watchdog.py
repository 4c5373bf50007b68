"""Says who waits for whom when nothing has happened for a while, and ends a wait for a process that does nothing."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prl.launch.launcher import ProcessDied
from prl.launch.processes import Condition
from prl.orchestrator.waiting import Waiting

QUIET_S = 10.0
"""Silence before the first word, seconds; each next one takes twice as long."""
START_S = 30.0
"""Silence before the first word of a start at which some process works, seconds: an engine takes that long."""
LOOK_S = 1.0
"""Time between two looks, seconds."""
ASLEEP, BUSY = 0.05, 0.8
"""Cores below which a process sleeps and above which it computes, or spins."""


@dataclass
class Watchdog:
    """Looks at a run's progress, and at its processes as long as there is none.

    A process that has been stopped (SIGSTOP) for `stopped_timeout_s` while the run made no progress counts as dead. So
    does one that the run waits for and that sleeps when the configured deadline of the wait has passed.
    """

    waiting: Callable[[], Waiting]
    conditions: Callable[[], Sequence[Condition]]
    say: Callable[[str], None]
    stopped_timeout_s: float
    _before: Waiting | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)
    """When there was progress last."""
    _looked: float = field(default=-LOOK_S, init=False)
    _next: float = field(default=QUIET_S, init=False)
    """Silence before the next word, seconds."""
    _cpu_s: dict[str, float] = field(default_factory=dict, init=False)
    """CPU time of each process when there was progress last."""
    _stopped_s: dict[str, float] = field(default_factory=dict, init=False)
    """For how long each process has been seen stopped."""

    def look(self) -> None:
        """Look once, if it is time to. Raises ProcessDied naming a process that is not going to go on."""
        now = time.monotonic()
        passed_s, looked = now - self._looked, self._looked
        if passed_s < LOOK_S:
            return
        self._looked, found = now, self.waiting()
        if self._before is None or found.done != self._before.done:
            self._progress(found, now)
            return
        self._before, quiet_s = found, now - self._since
        seen = self.conditions()
        # A suspended machine counts as one look.
        step_s = min(passed_s, 2 * LOOK_S) if looked > self._since else 0.0
        self._stopped_s = {c.name: self._stopped_s.get(c.name, 0.0) + step_s for c in seen if c.stopped}
        for each in seen:
            self._cpu_s.setdefault(each.name, each.cpu_s)
        silence_s = max(self._next, START_S) if found.starting and self._works(seen, quiet_s) else self._next
        if quiet_s >= silence_s:
            self._next = 2 * silence_s
            head = (
                f"starting, nothing new for {quiet_s:.0f} s" if found.starting else f"no progress for {quiet_s:.0f} s"
            )
            self.say(f"{head}: {found.what}{self._said_of(seen, found, quiet_s)}")
        self._judge(seen, found, quiet_s)

    def forget(self) -> None:
        """A process was started again: begin anew."""
        self._before = None

    def _progress(self, found: Waiting, now: float) -> None:
        before, quiet_s = self._before, now - self._since
        if before is not None and self._next > QUIET_S and not before.starting:
            self.say(f"going on after {quiet_s:.0f} s")
        self._before, self._since, self._next = found, now, QUIET_S
        self._stopped_s.clear()
        self._cpu_s.clear()

    def _works(self, seen: Sequence[Condition], quiet_s: float) -> bool:
        """Whether no process is stopped, and one uses the CPU."""
        return not any(c.stopped for c in seen) and any(self._cores(c, quiet_s) >= ASLEEP for c in seen)

    def _said_of(self, seen: Sequence[Condition], found: Waiting, quiet_s: float) -> str:
        """What the process that is waited for is doing, at the start each, and which others are stopped."""
        said = [self._state(c, quiet_s) for c in seen if c.stopped or c.role in found.processes or found.starting]
        return f" ({'; '.join(said)})" if said else ""

    def _state(self, seen: Condition, quiet_s: float) -> str:
        if seen.stopped:
            return f"process {seen.name} is stopped: {seen.stopped}, state T"
        cores = self._cores(seen, quiet_s)
        doing = "sleeps" if cores < ASLEEP else "computes or spins" if cores > BUSY else "works"
        return f"process {seen.name} {doing}, at {cores:.2f} cores"

    def _cores(self, seen: Condition, quiet_s: float) -> float:
        """Cores that the process has used since there was progress."""
        return max(0.0, seen.cpu_s - self._cpu_s[seen.name]) / quiet_s

    def _judge(self, seen: Sequence[Condition], found: Waiting, quiet_s: float) -> None:
        for each in seen:
            stopped_s = self._stopped_s.get(each.name, 0.0)
            if stopped_s >= self.stopped_timeout_s:
                raise ProcessDied(
                    f"process {each.name!r} was stopped for {stopped_s:.0f} s ({each.stopped}, state T; launcher."
                    f"stopped_timeout_s) while {found.what}",
                    each.name,
                )
            idle = each.role in found.processes and not each.running and not each.stopped
            if idle and quiet_s > found.upper_s and self._cores(each, quiet_s) < ASLEEP:
                raise ProcessDied(f"process {each.name!r} has slept for {quiet_s:.0f} s while {found.what}", each.name)
