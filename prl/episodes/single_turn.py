"""Play groups of single-turn tasks: a prompt and a reply, without a tool or another party in between.

All rollouts of a group start from the same prompt, so the whole group is one request for `n` completions.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from verifiers.v1 import graph
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.trace import TimeSpan, Trace

from prl.episodes.grading import grade
from prl.episodes.group import GroupRequest
from prl.episodes.isolation import as_finished
from prl.episodes.turn import AGENT, commit, opening_messages, trace_task
from prl.errors import EngineError
from prl.inference.sampler import OverlongPrompt
from prl.rollouts.rollout import Rollout


async def play_group(request: GroupRequest) -> AsyncGenerator[Rollout, None]:
    """Play a group and yield each rollout as soon as it is graded, with its samples attached, or has failed.

    The time that the consumer takes between two rollouts does not count towards `request.timeout_s`. Closing the
    generator cancels the graders that still run.
    """
    task = trace_task(request.task)
    version = request.sampler.version
    rollouts = [request.new_rollout(Trace(task=task, agent=AGENT), index, version) for index in range(request.n)]
    deadline = asyncio.get_running_loop().time() + request.timeout_s
    failure: Exception | None = None
    try:
        async with asyncio.timeout_at(deadline):
            await _sample(request, rollouts)
    except (EngineError, OverlongPrompt) as error:
        failure = error
    except TimeoutError:
        failure = request.timeout_error()
    if failure is not None:
        for rollout in rollouts:
            rollout.fail(failure)
            yield rollout
        return

    async def graded(rollout: Rollout) -> Rollout:
        await grade(request, rollout, deadline)
        return rollout

    async with contextlib.aclosing(as_finished(map(graded, rollouts))) as finished:
        async for rollout in finished:
            yield rollout


async def _sample(request: GroupRequest, rollouts: list[Rollout]) -> None:
    """Sample one reply for each rollout in one request, and commit each to its trace."""
    sampler, messages = request.sampler, opening_messages(request.task)
    rendered = sampler.renderer.render([message_to_wire(m) for m in messages], add_generation_prompt=True)
    started = time.time()
    completions = await sampler.complete(rendered.token_ids, n=len(rollouts), key=request.key)
    span = TimeSpan(start=started, end=time.time())
    for rollout, completion in zip(rollouts, completions, strict=True):
        commit(graph.prepare_turn(rollout.trace, messages), rendered, completion, sampler, span)
        rollout.read_versions()
