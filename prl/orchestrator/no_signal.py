"""Advice for a run that has nothing to train on."""

from collections.abc import Iterable, Mapping

from prl.base.errors import SIGNAL_REMEDY
from prl.base.metric_names import SAMPLED
from prl.base.text import in_one_line, safe
from prl.rollouts.rollout import Rollout


def what_to_look_at(rollouts: Iterable[Rollout], metrics: Mapping[str, float] | None = None) -> str:
    """Return advice in a line: the rewards of these rollouts, possible causes, and one reply.

    Control characters of the reply are written out, so that it does nothing to a terminal. `metrics` are the newest of
    the run, which say whether rewards were earned before.
    """
    graded = [rollout for rollout in rollouts if not rollout.failed]
    if not graded:
        return "Every rollout failed"
    rewards, cut_off = [rollout.reward for rollout in graded], sum(rollout.is_truncated for rollout in graded)
    low, high, reply = min(rewards), max(rewards), graded[0].trace.last_reply.strip()
    earned = f"Every reward is {low:g}" if low == high else f"Rewards are from {low:g} to {high:g}"
    return (
        f"{earned}; a length limit cut off {cut_off} of {len(graded)} replies. {causes(low, high, metrics or {})} One "
        f"reply, with reward {rewards[0]:g}: {safe(in_one_line(reply)) if reply else 'an empty one'}"
    )


def causes(low: float, high: float, metrics: Mapping[str, float]) -> str:
    """Return possible causes of rewards between `low` and `high` that bring no signal, by what was earned before."""
    before = metrics.get(f"{SAMPLED.removesuffix('mean')}max", low)
    if before > high:
        return (
            f"Rewards were earned until step {metrics['step']:.0f}, {metrics[SAMPLED]:.2g} in the mean: since then the "
            "policy was ruined (a lower trainer.optim.lr, from a checkpoint before), or tasks, grader or limits "
            "changed. The run's page says what moved first."
        )
    if low == high and metrics.get(SAMPLED, high) < high:
        return "All that can be earned is earned: harder tasks, or orchestrator.stop.target to end there."
    return (
        "Where a group's rewards are equal, look at the replies in rollouts/ and at the grader: a reply that it cannot "
        "parse earns what a wrong one does. Or the tasks are too easy or too hard for this model, or group_size is 1: "
        f"try {SIGNAL_REMEDY}."
    )
