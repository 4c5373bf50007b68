"""Grade a trace: in this process where its env says that its code is quick, else in one of the env's workers.

To a worker go the task and the trace: messages, tokens, what was recorded so far. Back come rewards, metrics, `info`
and the usage of judges, as plain data. What else a grader changes stays in its process.
"""

import copy
import functools
import pickle
from typing import Any

import verifiers.v1 as vf
from pydantic import BaseModel, ValidationError
from verifiers.v1.errors import TaskError
from verifiers.v1.trace import Reward
from verifiers.v1.types import Usage

from prl.base.errors import ConfigError
from prl.envs import _verifiers_internals  # noqa: F401  patches verifiers' scoring, in workers too
from prl.envs.turn import trace_task
from prl.envs.workers import EnvCodeError, EnvProcessEnded, Workers

WORKERS = "_prl_workers"
"""Attribute of the tasks of an env with workers; a copy of a task has it as well."""


class Scores(BaseModel):
    """The rewards and metrics that grading leaves on a trace."""

    rewards: dict[str, Reward | None]
    metrics: dict[str, float | None]
    info: dict[str, Any]
    extra_usage: list[Usage]


async def grade(task: vf.Task, trace: vf.Trace) -> None:
    """Run the task's metrics and rewards on `trace`, and record what they give.

    Raises:
        TaskError: One of them raised, as verifiers says it.
        EnvProcessEnded: One of them ended its process.
    """
    workers: Workers | None = vars(task).get(WORKERS)
    if workers is None:
        await task.score(trace)
        return
    fields = trace.model_dump(exclude={"task", "agent", "state"}, exclude_computed_fields=True)
    try:
        argument = pickle.dumps((own(task), trace.agent, trace.state, fields))
        scores = Scores.model_validate(await workers.call(score, argument))
    except EnvCodeError as error:
        raise (TaskError if error.name == "TaskError" else RuntimeError)(str(error)) from error
    except ValidationError as error:
        raise EnvProcessEnded(f"what grading recorded cannot be read: {error}") from error
    for name in Scores.model_fields:
        setattr(trace, name, getattr(scores, name))


async def score(argument: bytes) -> dict[str, Any]:
    """Grade in a worker."""
    task, agent, state, fields = pickle.loads(argument)  # of the run's making
    trace = vf.Trace(task=trace_task(task), agent=agent, state=state, **fields)
    await task.score(trace)
    return trace.model_dump(include=set(Scores.model_fields), exclude_computed_fields=True)


def give_to_workers(tasks: list[vf.Task], workers: Workers, *, played_by_verifiers: bool = False) -> None:
    """Have tasks graded by `workers`, by verifiers' own episodes as well. Raises ConfigError where they cannot be."""
    try:
        # Tried here with one task: else every rollout would fail by it.
        pickle.loads(pickle.dumps(tasks[0]))
    except Exception as error:
        raise ConfigError(
            f"envs.{workers.name}.taskset: its tasks cannot be sent to the processes of its graders: {error}: let them "
            f"hold plain data and be of a class at the top of a module, or set envs.{workers.name}.in_process=true"
        ) from error
    for task in tasks:
        vars(task)[WORKERS] = workers
        if played_by_verifiers:
            vars(task)["score"] = functools.partial(_score, task)


def own(task: vf.Task) -> vf.Task:
    """Return the task as it was before `give_to_workers`."""
    copied = copy.copy(task)
    for name in (WORKERS, "score"):
        vars(copied).pop(name, None)
    return copied


async def _score(task: vf.Task, trace: vf.Trace, runtime: Any = None) -> None:
    """Grade in place of `Task.score`; no metric or reward of the task needs a runtime."""
    if task.scoring_deferred:
        return
    copied = copy.copy(task)  # verifiers may have played a copy with other data
    copied.data = trace.task.data
    await grade(copied, trace)
