"""The budget of failed rollouts: how many may fail before the run ends."""

import logging
from collections import Counter, deque

from prl.errors import PrlError
from prl.orchestrator.types import Group
from prl.rollouts.rollout import ERROR_KINDS, Rollout

log = logging.getLogger(__name__)

WINDOW = 256  # latest rollouts of an env, over which the share is taken
LEAST = 64  # rollouts before an env is judged


class ErrorBudget:
    """Counts failed rollouts by kind, and ends the run if an env loses more than the share `limit` of its latest ones.

    Invariant: every failed rollout is in the metrics once. A failure while a frozen model was away is counted there,
    but not against the env: that model has a deadline of its own.
    """

    def __init__(self, env_names: list[str], limit: float):
        self.limit = limit
        self._recent: dict[str, deque[tuple[str, str] | None]] = {name: deque(maxlen=WINDOW) for name in env_names}
        """The last rollouts of each env: kind and reason of a failed one, else None."""
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in env_names}
        self._warned: set[tuple[str, str]] = set()

    def add(self, group: Group) -> None:
        """Count a finished group."""
        ends = [failure_of(rollout) for rollout in group.rollouts]
        failed = [failure for failure in ends if failure is not None]
        self._counts[group.env_name].update(kind for kind, _ in failed)
        for kind, reason in failed:
            if (group.env_name, kind) not in self._warned:
                self._warned.add((group.env_name, kind))
                log.warning("env %s: a rollout failed (%s; the first of its kind): %s", group.env_name, kind, reason)
        if not (failed and group.excused):
            self._recent[group.env_name].extend(ends)

    def check(self, step: int) -> None:
        """Raise PrlError if more than the limit failed, with the env, the kinds and the last reason."""
        for name, recent in self._recent.items():
            failed = [failure for failure in recent if failure is not None]
            if len(recent) >= LEAST and len(failed) > self.limit * len(recent):
                kinds = Counter(kind for kind, _ in failed).most_common()
                raise PrlError(
                    f"step {step}: {len(failed)} of the last {len(recent)} rollouts of env {name!r} failed, more than "
                    f"orchestrator.max_error_share={self.limit:g} allows ({', '.join(f'{k}: {n}' for k, n in kinds)}); "
                    f"the last because of {failed[-1][1]}"
                )

    def take(self) -> dict[str, float]:
        """`errors/{all,<env>}/<kind>` and `rollouts/errored`: rollouts that failed since the last call."""
        parts = {"all": sum(self._counts.values(), Counter()), **self._counts}
        line = {f"errors/{name}/{kind}": float(part[kind]) for name, part in parts.items() for kind in ERROR_KINDS}
        line["rollouts/errored"] = float(parts["all"].total())
        self._counts = {name: Counter() for name in self._counts}
        return line


def failure_of(rollout: Rollout) -> tuple[str, str] | None:
    """Kind and reason of a failed rollout; None for one that did not fail."""
    return (rollout.error_kind or "env", rollout.error or "") if rollout.failed else None
