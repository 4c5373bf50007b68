"""Grade a trace: in this process where its env says that its code is quick, else in one of the env's workers.

To a worker goes which task it is, and the trace: messages, tokens, what was recorded so far. Back come rewards,
metrics, `info` and the usage of judges, as plain data. What else a grader changes stays in its process.
"""

import asyncio
import copy
import functools
import operator
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import verifiers.v1 as vf
from verifiers.v1.errors import TaskError
from verifiers.v1.trace import Reward
from verifiers.v1.types import Usage

from prl.episodes.calls import EnvCodeError, EnvProcessEnded
from prl.episodes.isolation import alone, as_failure
from prl.episodes.turn import AGENT, trace_task
from prl.episodes.workers import Workers

PLACE = "_prl_place"
"""Attribute of the tasks of an env with workers; a copy of a task has it as well."""
SENT = {
    "id",
    "verifiers",
    "tools",
    "nodes",
    "calls",
    "rewards",
    "metrics",
    "info",
    "root_reply",
    "extra_usage",
    "is_completed",
    "stop_condition",
    "is_timeout",
    "timing",
    "mm_token_type_id_map",
}
"""Fields of a trace that a grader may read."""


@dataclass(frozen=True)
class Place:
    """Where a task is graded: by which workers, as their how manieth task."""

    workers: Workers
    number: int
    data: vf.TaskData
    """As it was loaded."""

    def __deepcopy__(self, _: Any) -> "Place":
        return self


class Scores(msgspec.Struct):
    """What grading leaves on a trace."""

    rewards: dict[str, tuple[float, float] | None]
    """Score and weight."""
    metrics: dict[str, float | None]
    info: dict[str, Any]
    usage: list[dict[str, Any]]


async def grade(task: vf.Task, trace: vf.Trace) -> None:
    """Run the task's metrics and rewards on `trace`, and record what they give.

    Raises:
        TaskError: One of them raised, as verifiers says it.
        EnvProcessEnded: One of them ended its process.
    """
    place: Place | None = vars(task).get(PLACE)
    if place is None:
        await task.score(trace)
        return
    argument = {"task": place.number, "trace": trace.model_dump(include=SENT), "agent": trace.agent.name}
    argument["trainable"] = trace.agent.trainable
    if type(trace.state) is not vf.State:
        argument["state"] = trace.state.model_dump()
        argument["state_class"] = [type(trace.state).__module__, type(trace.state).__qualname__]
    if task.data is not place.data:  # a copy with other data
        argument["data"] = task.data.model_dump()
    try:
        found = msgspec.convert(await place.workers.call(argument), Scores)
    except (TypeError, UnicodeEncodeError, OverflowError) as error:
        raise TypeError(
            f"{error}: what a rollout has in its state and info must be plain data to be graded in another process "
            "(or say IN_PROCESS = True in the taskset's class)"
        ) from error
    except EnvCodeError as error:
        raise (TaskError if error.name == "TaskError" else RuntimeError)(str(error)) from error
    except msgspec.ValidationError as error:
        raise EnvProcessEnded(f"what grading recorded cannot be read: {error}") from error
    trace.rewards = {
        name: None if reward is None else Reward(score=reward[0], weight=reward[1])
        for name, reward in found.rewards.items()
    }
    trace.metrics, trace.info = found.metrics, found.info
    trace.extra_usage = [Usage.model_validate(usage) for usage in found.usage]


class Grader:
    """Grades in a worker: the handler of an env's calls.

    Args:
        tasks: Of the env, in the order of their numbers.
    """

    def __init__(self, tasks: list[vf.Task]):
        self.tasks = tasks

    async def __call__(self, argument: Any) -> dict[str, Any]:
        task = self.tasks[argument["task"]]
        if "data" in argument:
            task = copy.copy(task)
            task.data = type(task.data).model_validate(argument["data"])
        agent = AGENT.model_copy(update={"name": argument["agent"], "trainable": argument["trainable"]})
        state = vf.State()
        if "state" in argument:  # of a class that there was before the worker was forked
            module, name = argument["state_class"]
            state = operator.attrgetter(name)(sys.modules[module]).model_validate(argument["state"])
        trace = vf.Trace(task=trace_task(task), agent=agent, state=state, **argument["trace"])
        try:
            await alone(
                type(task).score(task, trace), asyncio.get_running_loop()
            )  # verifiers' own, whatever the task was given in the run
        except BaseException as error:
            if (failure := as_failure(error)) is error:
                raise
            raise failure from error
        return {
            "rewards": {name: r and (r.score, r.weight) for name, r in trace.rewards.items()},
            "metrics": trace.metrics,
            "info": trace.info,
            "usage": [usage.model_dump() for usage in trace.extra_usage],
        }


def give_places(tasks: list[vf.Task], workers: Workers, *, played_by_verifiers: bool = False) -> None:
    """Have tasks graded by `workers`, of whose `Grader` they are the tasks, by verifiers' own episodes as well."""
    for number, task in enumerate(tasks):
        vars(task)[PLACE] = Place(workers, number, task.data)
        if played_by_verifiers:
            vars(task)["score"] = functools.partial(_score, task)


async def _score(task: vf.Task, trace: vf.Trace, runtime: Any = None) -> None:
    """Grade in place of `Task.score`; no metric or reward of the task needs a runtime."""
    if task.scoring_deferred:
        return
    copied = copy.copy(task)  # verifiers may have played a copy with other data
    copied.data = trace.task.data
    await grade(copied, trace)
