"""The state of an orchestrator between two batches: taken for a checkpoint, and put back where a run goes on."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prl.errors import NoSignal
from prl.orchestrator.state import (
    HeldGroup,
    HeldState,
    RunState,
    SavedTask,
    hold,
    hold_alone,
    load_components,
    restored,
    save_components,
)
from prl.orchestrator.types import Group
from prl.rollouts.records import write_records
from prl.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from prl.orchestrator.orchestrator import Orchestrator

log = logging.getLogger(__name__)


def held(run: "Orchestrator") -> HeldState:
    """What the orchestrator holds now, after the batch of the step that was shipped last and before the next."""

    def place(group: Group) -> int:
        return group.env.positions.get(id(group.task), -1)

    # What arrived before a run ended early is in its last line.
    arrived = {id(rollout) for rollout in run.intake.arrived} if run.ended_because is None else set()
    groups = [
        HeldGroup(g.id, g.env.name, place(g), g.start_version, g.excused, "waiting", hold(g.rollouts, arrived))
        for g in run.batcher.groups
    ]
    groups += hold_alone(run.left, "left", arrived) + hold_alone(run.counted, "counted", arrived)
    state = RunState(
        step=run.weight_sync.shipped,
        next_group=run.dispatcher.next_id,
        started=dict(run.dispatcher.started),
        groups=[],
        in_flight=[SavedTask(g.id, g.env.name, place(g)) for g in run.dispatcher.under_way],
        components=save_components(run.envs),
        sums=dict(run.sums),
        mean_tokens=run.batcher.mean_tokens,
    )
    return HeldState(state, groups)


@contextlib.contextmanager
def held_at_the_end(run: "Orchestrator") -> Iterator[None]:
    """Give the checkpoints the state when the block has ended or is cancelled, with the groups then in flight.

    Also when it raises NoSignal: then the rollouts that no batch holds are recorded, too.
    """
    try:
        yield
    except (asyncio.CancelledError, NoSignal) as end:
        run.checkpoints.hold(held(run))
        if isinstance(end, NoSignal):
            write_records(run.run_dir, run.weight_sync.shipped + 1, run.left)
        raise
    run.checkpoints.hold(held(run))


def restore(run: "Orchestrator", state: RunState) -> None:
    """Make `run`, which has not begun, go on from `state`."""
    load_components(run.envs, state.components)
    envs = {env.name: env for env in run.envs}
    counted: list[Rollout] = []
    for saved in state.groups:
        group = restored(saved, envs[saved.env])
        rollouts = {"left": run.left, "counted": counted}.get(saved.place)
        if rollouts is None:
            run.batcher.groups.append(group)
        else:
            rollouts += group.rollouts
        run.intake.arrived += [r for r, s in zip(group.rollouts, saved.rollouts, strict=True) if s.arrived]
    run.counted += counted
    if counted:
        write_records(run.run_dir, state.step + 1, counted)
    run.sums.update(state.sums)
    run.batcher.mean_tokens = state.mean_tokens
    known = [(each.group, envs[each.env], each.task) for each in state.in_flight if each.task >= 0]
    if lost := len(state.in_flight) - len(known):
        log.warning("%d tasks that were in flight are not among their envs' tasks, and are not played again", lost)
    run.dispatcher.go_on(state.next_group, state.started, [(n, env, env.environment.tasks[at]) for n, env, at in known])
    if state.step < run.max_steps:  # the age limit may be lower than before
        run.drop(run.staleness.left_behind(state.step))
