"""Advice for a run that has nothing to train on."""

import statistics
from collections.abc import Iterable
from pathlib import Path

from prl.base.errors import SIGNAL_REMEDY
from prl.base.files import lines_of
from prl.base.metric_names import SAMPLED
from prl.base.text import in_one_line, safe
from prl.rollouts.rollout import Rollout

EARNED = 0.05
"""Mean reward of three steps in a row, above the present one, that was no luck."""


def mean_reward(rollouts: Iterable[Rollout]) -> float | None:
    """Return the mean reward of the rollouts that did not fail; None without any."""
    rewards = [rollout.reward for rollout in rollouts if not rollout.failed]
    return statistics.fmean(rewards) if rewards else None


def what_to_look_at(rollouts: Iterable[Rollout], run_dir: Path | None = None) -> str:
    """Return advice in a line: the rewards of these rollouts, possible causes, and one reply.

    Control characters of the reply are written out, so that it does nothing to a terminal. `run_dir` is that of a run
    whose metrics say whether rewards were earned before.
    """
    graded = [rollout for rollout in rollouts if not rollout.failed]
    if not graded:
        return "Every rollout failed"
    rewards, cut_off = [rollout.reward for rollout in graded], sum(rollout.is_truncated for rollout in graded)
    low, high, reply = min(rewards), max(rewards), graded[0].trace.last_reply.strip()
    earned = f"Every reward is {low:g}" if low == high else f"Rewards are from {low:g} to {high:g}"
    why = causes(low, high, {} if run_dir is None else rewards_before(run_dir))
    return (
        f"{earned}; a length limit cut off {cut_off} of {len(graded)} replies. {why} One reply, with reward "
        f"{rewards[0]:g}: {safe(in_one_line(reply)) if reply else 'an empty one'}"
    )


def rewards_before(run_dir: Path) -> dict[int, float]:
    """The sampled reward of each step, from the metrics that a run has written."""
    lines = lines_of(run_dir / "metrics.jsonl", dict[str, float | None], [])
    rewards = {int(line.get("step") or 0): line.get(SAMPLED) for line in lines}
    return {step: reward for step, reward in rewards.items() if reward is not None}


def causes(low: float, high: float, before: dict[int, float]) -> str:
    """Return possible causes of rewards from `low` to `high` that bring no signal, by the mean rewards before."""
    earned, best = list(before.values()), max(before.values(), default=high)
    sustained = max(map(statistics.fmean, zip(earned, earned[1:], earned[2:], strict=False)), default=high)
    if sustained - high >= max(EARNED, (best - high) / 2):
        # As long as at least half of the best was earned: a ruined policy earns by accident for some steps.
        last = max(step for step, reward in before.items() if reward - high >= (best - high) / 2)
        return (
            f"Rewards were earned until step {last}, {before[last]:.2g} in the mean: then the policy was ruined (lower "
            "trainer.optim.lr, and go on from a checkpoint before), or tasks, grader or limits changed. The run's "
            "page says what moved first."
        )
    if low == high >= 1 and high > min(earned, default=high):  # less may not be all
        return "All that can be earned is earned: harder tasks, or orchestrator.stop.target to end there."
    return (
        "Where a group's rewards are equal, look at the replies in rollouts/ and at the grader: a reply that it cannot "
        "parse earns what a wrong one does. Or the tasks are too easy or too hard for this model, or group_size is 1: "
        f"{SIGNAL_REMEDY}."
    )
