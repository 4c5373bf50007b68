"""Grade a rollout: run the env's reward functions over its trace, and attach its samples."""

import asyncio

from verifiers.v1.trace import Trace

from prl.episodes.group import GroupRequest
from prl.episodes.isolation import ESCAPING_EXCEPTIONS, as_failure
from prl.rollouts.rollout import Rollout
from prl.rollouts.samples import TokenMismatch

MAX_REWARD = 3e38
"""Largest reward by absolute value: credit is a difference of rewards, and must be finite in float32."""


async def grade(request: GroupRequest, rollout: Rollout, deadline: float) -> None:
    """Grade a finished rollout and attach its samples.

    An exception of the env's reward functions, or their delay beyond `deadline` (in the event loop's time), fails this
    rollout only.
    """
    try:
        async with asyncio.timeout_at(deadline) as clock:
            await request.task.score(rollout.trace)
        check_reward(rollout.trace)
    except (Exception, *ESCAPING_EXCEPTIONS) as error:
        failure = as_failure(error)  # first: a cancellation counts even if the deadline passes at the same time
        rollout.fail(request.timeout_error() if clock.expired() else failure)
        return
    try:
        rollout.attach_samples()
    except TokenMismatch as error:
        rollout.fail(error)
        return
    rollout.trace.ok = rollout.trace.is_completed = True


def check_reward(trace: Trace) -> None:
    """Raise ValueError for a reward that would make the credit of its group NaN or infinite."""
    if not abs(trace.reward) <= MAX_REWARD:
        raise ValueError(f"the grader gave reward {trace.reward}")
