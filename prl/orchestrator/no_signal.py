"""Advice for a run that has nothing to train on."""

from collections.abc import Iterable

from prl.base.text import in_one_line, safe
from prl.rollouts.rollout import Rollout


def what_to_look_at(rollouts: Iterable[Rollout]) -> str:
    """Return advice in a line: the rewards of these rollouts, possible causes, and one reply.

    Control characters of the reply are written out, so that it does nothing to a terminal.
    """
    graded = [rollout for rollout in rollouts if not rollout.failed]
    if not graded:
        return "Every rollout failed"
    rewards, cut_off = [rollout.reward for rollout in graded], sum(rollout.is_truncated for rollout in graded)
    low, high, reply = min(rewards), max(rewards), graded[0].trace.last_reply.strip()
    earned = f"Every reward is {low:g}" if low == high else f"Rewards are from {low:g} to {high:g}"
    return (
        f"{earned}; a length limit cut off {cut_off} of {len(graded)} replies. Where a group's rewards are equal, look "
        "at the replies in rollouts/ and at the grader: a reply that it cannot parse earns what a wrong one does. Or "
        "the tasks are too easy or too hard for this model, or group_size is 1. One reply, with reward "
        f"{rewards[0]:g}: {safe(in_one_line(reply)) if reply else 'an empty one'}"
    )
