"""Report of who waits for whom, read from what the orchestrator knows."""

from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prl.orchestrator.orchestrator import Orchestrator

ENGINE = "engine"
"""Name of the process of the policy's engine; several are `engine`, `engine 2`, `engine 3`."""


class Waiting(NamedTuple):
    """The thing that a run waits for now."""

    what: str
    """`the orchestrator waits for policy version 3 from the trainer`."""
    done: Hashable
    """Changes with every reply, rollout, group, batch, step and version."""


def numbered(name: str, place: int) -> str:
    """The name of the process of a model's server number `place`, from 0."""
    return f"{name} {place + 1}" if place else name


def waiting(run: "Orchestrator") -> Waiting:
    """Return what the orchestrator waits for."""
    groups = list(run.dispatcher.in_flight)
    arrived = sum(len(group.rollouts) for group in groups)
    steps, pool = run.steps, run.weight_sync.pool
    done = (steps.shipped, steps.trained, pool.version, pool.answered, arrived, len(groups), run.batcher.rollouts)
    if pool.loading is not None:
        return Waiting(f"the orchestrator waits for the engine to load policy version {pool.loading}", done)
    asked = pool.requests_in_flight
    source = f"the engine ({asked} requests)" if asked else "other models, tools and graders"
    if run.weight_sync.busy:
        return Waiting(f"the evaluation of policy version {pool.version} waits for {source}", done)
    if not groups:
        return Waiting(f"the orchestrator waits for policy version {steps.trained + 1} from the trainer", done)
    missing = Counter[str]()
    for group in groups:
        missing[group.env.name] += group.env.rollouts_per_group - len(group.rollouts)
    rollouts = ", ".join(f"{count} rollouts of env {name}" for name, count in missing.items() if count)
    return Waiting(f"the orchestrator waits for {rollouts or f'the scores of {arrived} rollouts'} from {source}", done)
