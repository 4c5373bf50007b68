"""The next step's records and metrics line, as far as they are known before its batch is shipped."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prl.orchestrator.metrics import metrics_of_batch, metrics_of_filters, shares_of_envs
from prl.orchestrator.staleness import NONE_DROPPED
from prl.orchestrator.state import RunState, restored
from prl.orchestrator.types import TrainEnv
from prl.rollouts.records import write_records
from prl.rollouts.rollout import Rollout, Stage


class NextStep:
    """Keeps rollouts that have ended until their step has its record and its metrics line.

    Invariant: each rollout that `left`, and each of a cut batch, is recorded once. Each of a cut batch, and each that a
    `pre_batch` filter dropped, counts in one metrics line: that of the first step which is shipped afterwards.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.left: list[Rollout] = []
        """Rollouts of groups that no batch holds, not recorded yet."""
        self.counted: list[Rollout] = []
        """Recorded rollouts that the next metrics line counts."""
        self.sums: Counter[str] = Counter()
        """Seconds, and dropped rollouts and tokens, that the next line adds up, by metric."""

    def load_state_dict(self, state: RunState, envs: Mapping[str, TrainEnv]) -> None:
        """Go on from an earlier part of the run. What the next line counts is recorded with its step again."""
        for saved, rollouts in ((state.left, self.left), (state.counted, self.counted)):
            for group in saved:
                rollouts += restored(group, envs[group.env]).rollouts
        self.sums.update(state.sums)
        if self.counted:  # the records of steps after the checkpoint were removed
            write_records(self.run_dir, state.step + 1, self.counted)

    def leave(self, rollouts: Sequence[Rollout]) -> None:
        """Take rollouts of a group that no batch holds."""
        self.left += rollouts

    def add(self, sums: Mapping[str, float]) -> None:
        """Add to sums of the next metrics line."""
        self.sums.update(sums)

    def record(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Record the rollouts of a cut batch with `step`, and those that left before."""
        write_records(self.run_dir, step, [*rollouts, *self.left])
        self.counted += [*rollouts, *(rollout for rollout in self.left if rollout.stage is Stage.PRE_FILTERED)]
        self.left.clear()

    def record_left(self, step: int) -> None:
        """Record with `step` what left after its batch: no other follows."""
        if self.left:
            write_records(self.run_dir, step, self.left)
            self.left.clear()

    def take(
        self,
        step: int,
        envs: Sequence[TrainEnv],
        size_of: Callable[[list[Rollout]], int],
        replayed: Sequence[Rollout],
    ) -> dict[str, float]:
        """Return the metrics of `step`, and begin those of the one after it.

        Args:
            step: The step whose batch is shipped.
            envs: The envs of the run.
            size_of: Says how much of a batch rollouts are.
            replayed: Rollouts of earlier batches that the step trains on again.
        """
        filters = {env.name: env.filters for env in envs}
        line = metrics_of_batch(self.counted, step, replayed) | metrics_of_filters(self.counted, filters)
        line |= shares_of_envs(self.counted, list(filters), size_of) | NONE_DROPPED | self.sums
        self.counted.clear()
        self.sums.clear()
        return line
