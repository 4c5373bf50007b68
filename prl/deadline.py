"""How long to wait for something that has been waited for before."""

from dataclasses import dataclass

FLOOR_S = 60.0
"""A loaded machine makes everything slow at times: nothing is given up before this, seconds."""
MULTIPLE = 10.0


@dataclass
class Deadline:
    """A deadline that follows from what a run has seen: a multiple of the slowest so far."""

    floor_s: float = FLOOR_S
    """It is never shorter, seconds."""
    multiple: float = MULTIPLE
    slowest_s: float | None = None
    """The slowest so far, seconds; None = nothing has been seen."""

    def seen(self, seconds: float) -> None:
        """Something took `seconds`."""
        self.slowest_s = max(seconds, self.slowest_s or 0.0)

    def limit(self, upper_s: float) -> float:
        """How long to wait now, seconds: at most `upper_s`, and that where nothing has been seen."""
        return upper_s if self.slowest_s is None else min(upper_s, max(self.floor_s, self.multiple * self.slowest_s))
