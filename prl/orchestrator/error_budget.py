"""Which rollouts fail, and how many may."""

import logging
from collections import Counter, deque

from prl.errors import PrlError
from prl.orchestrator.types import Group
from prl.rollouts.rollout import ERROR_KINDS

log = logging.getLogger(__name__)

WINDOW = 256  # rollouts of an env that the share is taken over
LEAST = 64  # of them before it is judged


class ErrorBudget:
    """Counts failed rollouts by kind, and ends the run where an env loses more than `limit` of them.

    A failure while a frozen model was away is counted, but not held against the env: that model has a deadline of its own.
    """

    def __init__(self, env_names: list[str], limit: float):
        self.limit = limit
        self._recent: dict[str, deque[tuple[str, str] | None]] = {name: deque(maxlen=WINDOW) for name in env_names}
        """Of the last rollouts of each env: kind and reason where one failed, else None."""
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in env_names}
        self._seen: set[tuple[str, str]] = set()

    def add(self, group: Group) -> None:
        """Take note of a finished group."""
        failed = [rollout for rollout in group.rollouts if rollout.error is not None]
        self._counts[group.env_name].update(rollout.error_kind for rollout in failed)
        for rollout in failed:
            if (kind := (group.env_name, rollout.error_kind)) not in self._seen:
                self._seen.add(kind)
                log.warning("env %s: a rollout failed (%s; the first of its kind): %s", *kind, rollout.error)
        if not (failed and group.excused):
            self._recent[group.env_name].extend(
                None if r.error is None else (r.error_kind, r.error) for r in group.rollouts
            )

    def check(self, step: int) -> None:
        """Raise PrlError where more than the limit failed, with the env, the kinds and the last reason."""
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
