"""Tasks graded as a run does it, in workers."""

import asyncio

import verifiers.v1 as vf

from prl.envs.grading import grade
from prl.envs.turn import AGENT, trace_task


def new_trace(task):
    return vf.Trace(task=trace_task(task), agent=AGENT)


async def graded(task, limit_s):
    """The graded trace, or what grading raised."""
    trace = new_trace(task)
    try:
        async with asyncio.timeout(limit_s):
            await grade(task, trace)
    except Exception as error:
        return error
    return trace
