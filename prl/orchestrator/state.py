"""The orchestrator's side of a checkpoint: with the trainer's part, all that a run needs to go on.

The state of step n is what the orchestrator held between the batch of step n and that of step n+1: positions of the
buffers, finished groups that wait for a batch, and the tasks in flight. When the run goes on, those groups wait again,
and the tasks in flight are issued again under their old group ids. So no task is skipped, and none but those in flight
is played a second time.
"""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import verifiers.v1 as vf

from prl.episodes.turn import trace_task
from prl.errors import UNREADABLE, ConfigError, of_own_code
from prl.orchestrator.types import Group, TrainEnv
from prl.rollouts.rollout import Outcome, Rollout
from prl.user_code import called
from prl.wire.messages import TrainingSample

log = logging.getLogger(__name__)

Place = Literal["waiting", "left", "counted"]
"""Where a finished group was: waiting for a batch, dropped and not recorded, or in the next metrics line already."""
COMPUTED = {"num_input_tokens", "num_output_tokens", "num_total_tokens"}
"""What verifiers adds to a trace's dump and does not read back."""


class SavedRollout(msgspec.Struct):
    """A finished rollout."""

    trace: bytes
    """JSON, with lone surrogates and numbers that are not finite as Python's `json` writes them."""
    index: int
    start_version: int | None
    end_version: int | None
    temperature: float
    samples: list[TrainingSample]
    branches: list[int]
    """Of each sample, the number of its branch in the trace."""
    advantages: list[float] | None
    scoring_s: float
    difficulty_pool: str | None
    matched: dict[str, str]
    outcome: Outcome | None
    arrived: bool
    """Whether it has not been in a metrics line of what arrived."""


class SavedGroup(msgspec.Struct):
    """Finished rollouts of one task, all of its group or those that were in one place."""

    id: int
    env: str
    task: int
    """Position of the task in its env; -1 where it is not one of the env's."""
    start_version: int | None
    """None of a frozen model."""
    excused: bool
    place: Place
    rollouts: list[SavedRollout]


class SavedTask(msgspec.Struct):
    """A task in flight."""

    group: int
    env: str
    task: int


class SyncState(msgspec.Struct):
    """What `WeightSync` knows once a step is trained."""

    loaded: int = 0
    """The version that the engines had."""
    evaluated: int = -1
    """The version that was evaluated last."""
    lines: list[dict[str, int | float]] = []
    """Metrics lines of trained steps that no monitor has."""
    best: float | None = None
    worse: int = 0
    """Of early stopping: the highest held-out reward, and evaluations since."""
    seconds: float = 0.0
    """Time spent on training, that of earlier parts of the run included."""


class RunState(msgspec.Struct):
    """The content of `state/run.msgpack`."""

    step: int
    next_group: int
    """Id of the next group."""
    started: dict[str, float]
    """Rollouts started of each env, by which envs share what is in flight."""
    groups: list[SavedGroup]
    in_flight: list[SavedTask]
    components: dict[str, bytes]
    """`state_dict` of buffers, algorithms and filters by config key, as msgpack."""
    sums: dict[str, float]
    """Seconds and dropped rollouts of the next metrics line."""
    mean_tokens: float
    """Tokens of a rollout, by which a token batch is estimated."""
    sync: SyncState = msgspec.field(default_factory=SyncState)

    @property
    def first_line(self) -> int:
        """The first step whose metrics line is still to be written."""
        return min((int(line["step"]) for line in self.sync.lines), default=self.step + 1)


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on from."""

    run_dir: Path
    step: int
    """The step of the checkpoint; 0 where the run has none and begins again."""
    folder: Path | None
    """The checkpoint, None where there is none."""
    state: RunState | None
    """The orchestrator's side of it."""
    changed: dict[str, tuple[Any, Any]]
    """Keys whose values are others now: before and now."""
    steps: list[int]
    """The steps that had a checkpoint then."""

    @property
    def payload(self) -> dict[str, Any] | None:
        """The checkpoint as the trainer's process reads it."""
        return None if self.folder is None else {"folder": str(self.folder.resolve()), "step": self.step}


def encode(state: RunState) -> bytes:
    return msgspec.msgpack.encode(state)


def decode(data: bytes, path: object) -> RunState:
    """Raises ConfigError, naming `path`, for data that `encode` has not written."""
    try:
        return msgspec.msgpack.decode(data, type=RunState)
    except UNREADABLE as error:
        raise ConfigError(f"{path} does not hold the state of a run: {error}") from error


# --- components -------------------------------------------------------------------------------------------------------


def components_of(envs: Iterable[TrainEnv]) -> Iterator[tuple[str, Any]]:
    """The buffers, algorithms and filters of a run, each under a name that stays the same when the run goes on."""
    for env in envs:
        yield f"{env.name}.buffer", env.buffer
        yield f"{env.name}.algo", env.algorithm
        for slot, filters in env.filters.items():
            yield from ((f"{env.name}.filters.{slot}.{name}", each) for name, each in filters.items())


def save_components(envs: Iterable[TrainEnv]) -> dict[str, bytes]:
    """The state of every component that has one. Raises PrlError naming one whose `state_dict` fails."""
    saved = {}
    for name, component in components_of(envs):
        with called(name, component, "state_dict"):
            state = component.state_dict()
            if state is not None:
                saved[name] = msgspec.msgpack.encode(state)
    return saved


def load_components(envs: Iterable[TrainEnv], saved: Mapping[str, bytes]) -> None:
    """Hand each component the state that it had. Raises ConfigError naming one that does not take it."""
    for name, component in components_of(envs):
        if name not in saved:
            continue
        try:
            component.load_state_dict(msgspec.msgpack.decode(saved[name]))
        except BaseException as error:  # it may be the user's own class (`called`), or another one than before
            cls = type(component).__name__
            raise ConfigError(
                f"{name}: {cls} does not take the state that the checkpoint has for it: {of_own_code(error)}"
            ) from error


# --- finished groups --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldRollout:
    """A rollout as it is now: what happens to it later does not show in its checkpoint."""

    rollout: Rollout
    outcome: Outcome | None
    matched: dict[str, str]
    arrived: bool

    def save(self) -> SavedRollout:
        rollout = self.rollout
        branches = [branch.index for branch in rollout.sample_branches]
        trace = rollout.trace.model_dump(mode="python", exclude=COMPUTED)
        return SavedRollout(
            trace=json.dumps(trace, default=str).encode(),
            branches=branches,
            outcome=self.outcome,
            matched=self.matched,
            arrived=self.arrived,
            **{name: getattr(rollout, name) for name in KEPT},
        )


KEPT = (
    *("index", "start_version", "end_version", "temperature", "samples", "advantages"),
    *("scoring_s", "difficulty_pool"),
)
"""Attributes of a rollout that are saved as they are."""


@dataclass(frozen=True)
class HeldGroup:
    """Rollouts of a group that are in one place."""

    id: int
    env: str
    task: int
    start_version: float
    excused: bool
    place: Place
    rollouts: list[HeldRollout]

    def save(self) -> SavedGroup:
        version = None if math.isinf(self.start_version) else int(self.start_version)
        rollouts = [held.save() for held in self.rollouts]
        return SavedGroup(self.id, self.env, self.task, version, self.excused, self.place, rollouts)


@dataclass(frozen=True)
class HeldState:
    """The orchestrator's state between two batches, as it was then: encoding it can wait."""

    state: RunState
    """Without its groups."""
    groups: list[HeldGroup]


def hold(rollouts: Iterable[Rollout], arrived: set[int]) -> list[HeldRollout]:
    """The rollouts as they are now; `arrived` are the identities of those in no metrics line of what arrived."""
    return [HeldRollout(each, each.outcome, dict(each.matched), id(each) in arrived) for each in rollouts]


def hold_alone(rollouts: Sequence[Rollout], place: Place, arrived: set[int]) -> list[HeldGroup]:
    """Rollouts whose groups are gone, by group."""
    groups: dict[tuple[str, int], list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault((rollout.env_name, rollout.group_id), []).append(rollout)
    return [
        HeldGroup(number, env, -1, math.inf, False, place, hold(each, arrived))
        for (env, number), each in groups.items()
    ]


def restored(saved: SavedGroup, env: TrainEnv) -> Group:
    """A group as it was saved."""
    tasks = env.environment.tasks
    task = tasks[saved.task] if saved.task >= 0 else tasks[0]
    version = math.inf if saved.start_version is None else saved.start_version
    group = Group(saved.id, env, version, task, excused=saved.excused)
    for each in saved.rollouts:
        trace = vf.Trace.model_validate(json.loads(each.trace))
        if saved.task >= 0:
            trace.task = trace_task(task)  # verifiers reads the fields back that every task has, and no others
        rollout = Rollout(
            trace,
            env_name=saved.env,
            group_id=saved.id,
            start_version=each.start_version,
            temperature=each.temperature,
        )
        for name in KEPT:
            setattr(rollout, name, getattr(each, name))
        branches = trace.branches
        rollout.sample_branches = [branches[number] for number in each.branches]
        rollout.matched, rollout.outcome = each.matched, each.outcome
        group.rollouts.append(rollout)
    return group
