"""The orchestrator's side of a checkpoint: with the trainer's part, all that a run needs to go on.

Each part of the orchestrator has a `state_dict` and a `load_state_dict`, and `RunState` is what they make together. The
state of step n is what the orchestrator has between the batch of step n and that of step n+1: positions of the
curricula, finished groups that wait for a batch, and the tasks in flight. When the run goes on, those groups wait
again, and the tasks in flight are issued again under their old group ids. So no task is skipped, and none but those in
flight is played a second time.
"""

import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import verifiers.v1 as vf

from prl.base.errors import UNREADABLE, ConfigError, of_own_code
from prl.base.user_code import called
from prl.envs.turn import trace_task
from prl.orchestrator.types import Group, TrainEnv
from prl.rollouts.messages import TrainingSample
from prl.rollouts.rollout import Outcome, Rollout
from prl.rollouts.samples import samples_of

log = logging.getLogger(__name__)

COMPUTED = {"num_input_tokens", "num_output_tokens", "num_total_tokens"}
"""Fields that verifiers adds to a trace's dump and does not read back."""


class SavedRollout(msgspec.Struct):
    """A finished rollout as it was: what happens to it later does not show in its checkpoint."""

    trace: Any
    """The trace, which `encode` writes as JSON: bytes, with lone surrogates and numbers that are not finite as Python's
    `json` has them."""
    index: int
    start_version: int | None
    end_version: int | None
    temperature: float
    samples: list[TrainingSample]
    advantages: list[float] | None
    scoring_s: float
    difficulty_pool: str | None
    matched: dict[str, str]
    outcome: Outcome | None


class SavedGroup(msgspec.Struct):
    """Finished rollouts of one task, all of its group or those that were in one place."""

    id: int
    env: str
    task: int
    """Position of the task in its env; -1 where it is not one of the env's."""
    start_version: int | None
    """The policy version that its rollouts started from; None of a frozen model."""
    excused: bool
    rollouts: list[SavedRollout]
    uses: int = 0
    """Times that it has been replayed."""


class SavedTask(msgspec.Struct):
    """A task in flight."""

    group: int
    env: str
    task: int
    sent: list[tuple[int, str]] = []
    """Index and agent of rollouts that had gone on alone, and are not sent again (`Group.sent`)."""


class DispatcherState(msgspec.Struct):
    """The state that `Dispatcher` goes on with."""

    next_group: int = 0
    started: dict[str, float] = {}
    """Rollouts started of each env, by which envs share what is in flight."""
    in_flight: list[SavedTask] = []
    weights: dict[str, float] = {}
    """The weight of each env, as its curriculum has it."""


class IntakeState(msgspec.Struct):
    """The state that `Intake` goes on with."""

    arrived: list[str] = []
    """Ids of the traces that no metrics line of what arrived has counted."""
    judged: dict[str, int] = {}
    """Groups of each env that its curriculum has seen and no metrics line has counted."""


class BatcherState(msgspec.Struct):
    """The state that `Batcher` goes on with."""

    groups: list[SavedGroup] = []
    mean_tokens: float = 0.0
    """Tokens of a rollout, by which a token batch is estimated."""


class StoppingState(msgspec.Struct):
    """The state that `EarlyStopping` goes on with."""

    best: float | None = None
    """The highest held-out reward."""
    worse: int = 0
    """Evaluations since that of the highest reward."""
    seconds: float = 0.0
    """Time spent on training, that of earlier parts of the run included."""


class SyncState(msgspec.Struct):
    """The knowledge of `WeightSync` once a step was trained."""

    loaded: int = 0
    """The version that the engines had."""
    evaluated: int = -1
    """The version that was evaluated last; -1 before the first."""
    evaluation: dict[str, float] = {}
    """The metrics of that evaluation."""
    lines: list[dict[str, int | float]] = []
    """Metrics lines of trained steps that no monitor has."""
    stopping: StoppingState = msgspec.field(default_factory=StoppingState)


class RunState(msgspec.Struct):
    """The content of `state/run.msgpack`: what each part of the orchestrator goes on with."""

    step: int
    dispatcher: DispatcherState = msgspec.field(default_factory=DispatcherState)
    intake: IntakeState = msgspec.field(default_factory=IntakeState)
    batcher: BatcherState = msgspec.field(default_factory=BatcherState)
    replay: list[SavedGroup] = []
    """Groups that were trained on and may be replayed."""
    left: list[SavedGroup] = []
    """Rollouts that no batch holds and no record has."""
    counted: list[SavedGroup] = []
    """Recorded rollouts that the next metrics line counts."""
    sums: dict[str, float] = {}
    """Seconds and dropped rollouts of the next metrics line."""
    components: dict[str, bytes] = {}
    """`state_dict` of curricula, algorithms and filters by config key, as msgpack."""
    sync: SyncState = msgspec.field(default_factory=SyncState)

    @property
    def first_line(self) -> int:
        """The first step whose metrics line is still to be written."""
        return min((int(line["step"]) for line in self.sync.lines), default=self.step + 1)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run goes on from."""

    run_dir: Path
    """The directory of the run that has the checkpoint."""
    step: int
    """The step of the checkpoint; 0 where the run has none and begins again."""
    folder: Path | None
    """The checkpoint, None where there is none."""
    state: RunState | None
    """The orchestrator's side of it."""
    changed: dict[str, tuple[Any, Any]]
    """The values before and now of the config keys that have changed."""
    steps: list[int]
    """The steps that had a checkpoint when this one was chosen."""
    forks: bool = False
    """The checkpoint is another run's (`run.fork`), of which this one takes a copy."""

    @property
    def payload(self) -> dict[str, Any] | None:
        """The checkpoint as the trainer's process reads it."""
        return None if self.folder is None else {"folder": str(self.folder.resolve()), "step": self.step}


def encode(state: RunState) -> bytes:
    """Return the state as bytes. That may be late: traces do not change any more."""
    return msgspec.msgpack.Encoder(enc_hook=trace_json).encode(state)


def trace_json(trace: vf.Trace) -> bytes:
    """Return a trace as JSON."""
    return json.dumps(trace.model_dump(mode="python", exclude=COMPUTED), default=str).encode()


def decode(data: bytes, path: object) -> RunState:
    """Read what `encode` has written. Raises ConfigError, naming `path`, for other data."""
    try:
        return msgspec.msgpack.decode(data, type=RunState)
    except UNREADABLE as error:
        raise ConfigError(f"{path} does not hold the state of a run: {error}") from error


# --- components -------------------------------------------------------------------------------------------------------


def components_of(envs: Iterable[TrainEnv]) -> Iterator[tuple[str, Any]]:
    """Yield the curricula, algorithms and filters of a run, each under a name that a run which goes on has, too."""
    for env in envs:
        yield f"{env.name}.curriculum", env.curriculum
        yield f"{env.name}.algo", env.algorithm
        for slot, filters in env.filters.items():
            yield from ((f"{env.name}.filters.{slot}.{name}", made) for name, made in filters.items())


def save_components(envs: Iterable[TrainEnv]) -> dict[str, bytes]:
    """Return the state of every component that has one. Raises PrlError naming one whose `state_dict` fails."""
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


KEPT = (
    *("index", "start_version", "end_version", "temperature", "samples", "advantages"),
    *("scoring_s", "difficulty_pool", "outcome"),
)
"""Attributes of a rollout that are saved as they are."""


def saved_rollout(rollout: Rollout) -> SavedRollout:
    """Return a rollout as it is now."""
    kept = {name: getattr(rollout, name) for name in KEPT}
    return SavedRollout(trace=rollout.trace, matched=dict(rollout.matched), **kept)


def saved_group(group: Group) -> SavedGroup:
    """Return a group as it is now."""
    version = None if math.isinf(group.start_version) else int(group.start_version)
    rollouts = [saved_rollout(rollout) for rollout in group.rollouts]
    return SavedGroup(group.id, group.env.name, group.place, version, group.excused, rollouts, group.uses)


def saved_alone(rollouts: Iterable[Rollout]) -> list[SavedGroup]:
    """Return rollouts whose groups are gone, by group."""
    groups: dict[tuple[str, int], list[SavedRollout]] = {}
    for rollout in rollouts:
        groups.setdefault((rollout.env_name, rollout.group_id), []).append(saved_rollout(rollout))
    return [SavedGroup(number, env, -1, None, False, of_group) for (env, number), of_group in groups.items()]


def all_restored(saved: Iterable[SavedGroup], envs: Mapping[str, TrainEnv]) -> list[Group]:
    """Return groups as they were saved, with what the model's processor makes of their pictures.

    One with a picture that is gone is left out: the trainer could not read it.
    """
    groups = []
    for group in saved:
        env = envs[group.env]
        samples = [sample for rollout in group.rollouts for sample in rollout.samples]
        try:
            for picture in itertools.chain(*(sample.pictures or [] for sample in samples)):
                env.sampler.renderer.pictures.seen(picture.digest)
        except ValueError as error:
            log.warning("env %s: group %s of the checkpoint is left out: %s", group.env, group.id, error)
        else:
            groups.append(restored(group, env))
    return groups


def restored(saved: SavedGroup, env: TrainEnv) -> Group:
    """Return a group as it was saved."""
    tasks = env.environment.tasks
    # The rollouts have their task in their traces: where the env has none for the group, any stands in.
    task = tasks[saved.task] if saved.task >= 0 else tasks[0]
    version = math.inf if saved.start_version is None else saved.start_version
    group = Group(saved.id, env, version, task, excused=saved.excused, uses=saved.uses)
    for kept in saved.rollouts:
        # By Python's own JSON, which reads NaN and lone surrogates as it has written them.
        trace = vf.Trace.model_validate(json.loads(kept.trace))
        if saved.task >= 0:
            trace.task = trace_task(task)  # verifiers reads the fields back that every task has, and no others
        rollout = Rollout(
            trace,
            env_name=saved.env,
            group_id=saved.id,
            start_version=kept.start_version,
            temperature=kept.temperature,
        )
        for name in KEPT:
            setattr(rollout, name, getattr(kept, name))
        if kept.samples:  # the branches of a trace are made anew: a checkpoint has their tokens only
            made = samples_of(trace, env_name=saved.env, temperature=kept.temperature, live=rollout.live)
            rollout.sample_branches = [branch for _, branch in made]
        rollout.matched = kept.matched
        group.rollouts.append(rollout)
    return group
