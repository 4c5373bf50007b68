"""Play one group of an env and give its rollouts their credit."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from verifiers.v1.task import Task

from prl.orchestrator.types import Group, TrainEnv, attribute_errors_to, by_seat, task_group
from prl.rollouts.rollout import Rollout

T = TypeVar("T")


async def play_and_credit(env: TrainEnv, task: Task, group_id: int, start_version: float) -> Group:
    """Play, grade and credit one group.

    Each rollout is scored (`finalize_rollout`, which may call models) as soon as it is graded, while others of the
    group are still played: a slow grader or scorer delays its own rollout only. When all are scored, each seat is
    credited (`finalize_group`).

    Invariant: every rollout comes back, in the order of its episodes, and is either credited or has an outcome. Scoring
    ends `group_timeout_s` after the start. Crediting the group has a deadline of the same length of its own: whatever
    used up the first one has failed, and the other rollouts still get their credit.

    Raises:
        PrlError: The algorithm failed; the message names the env and the class.
        DeadlinePassed: A frozen model that the env needs was away for too long.
    """
    rollouts: list[Rollout] = []
    scored: list[asyncio.Task[bool]] = []
    excused = False  # looked at as each rollout fails: the model may be back when the group ends
    deadline = _deadline(env)
    playing = env.environment.play(task, env.group_size, env.sampler, group_id=group_id)
    async with task_group() as scoring, contextlib.aclosing(playing):
        async for rollout in playing:
            rollouts.append(rollout)
            excused = excused or (rollout.failed and not env.up)
            scored.append(scoring.create_task(_score(env, rollout, deadline)))
    rollouts.sort(key=lambda rollout: rollout.index)
    deadline = _deadline(env)
    for seat in by_seat(rollouts):
        await _in_time(env, env.algorithm.finalize_group, seat, seat, deadline)
    for rollout in rollouts:
        for sample in rollout.samples:
            sample.loss = env.loss
    excused = excused or any(task.result() for task in scored) or not env.up
    return Group(group_id, env.name, start_version, rollouts, excused=excused, task=task)


async def _score(env: TrainEnv, rollout: Rollout, deadline: float | None) -> bool:
    """Score a rollout on arrival. Returns whether it has failed while a frozen model that its env needs is away."""
    await _in_time(env, env.algorithm.finalize_rollout, rollout, [rollout], deadline)
    return rollout.failed and not env.up


def _deadline(env: TrainEnv) -> float | None:
    """When work that begins now has to end, in the event loop's time; None without a limit."""
    limit_s = env.environment.config.group_timeout_s
    return None if limit_s is None else asyncio.get_running_loop().time() + limit_s


async def _in_time(
    env: TrainEnv, finalize: Callable[[T], Awaitable[None]], what: T, rollouts: list[Rollout], deadline: float | None
) -> None:
    """Await `finalize(what)`. At the deadline it is cancelled, and those of its rollouts that are active fail."""
    try:
        async with asyncio.timeout_at(deadline) as clock:
            with attribute_errors_to(env):
                await finalize(what)
    except TimeoutError:
        if not clock.expired():
            raise
        limit_s = env.environment.config.group_timeout_s
        late = f"not scored when its group had taken {limit_s:g} s (envs.{env.name}.group_timeout_s)"
        for rollout in rollouts:
            rollout.fail(TimeoutError(late), "timeout")
