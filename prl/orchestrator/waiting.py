"""Who waits for whom, read from what the orchestrator knows."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prl.inference.client import ModelPool
    from prl.orchestrator.orchestrator import Orchestrator

ENGINE, TRAINER = "inference", "trainer"
"""Names of processes; several engines are `inference`, `inference 2`, `inference 3`."""


@dataclass(frozen=True)
class Waiting:
    """What a run waits for now, and how far it is."""

    what: str
    """`the orchestrator waits for policy version 3 from the trainer`."""
    processes: tuple[str, ...]
    """The processes that have to do something; none where that is not known."""
    done: Hashable
    """Changes with every bit of progress."""
    upper_s: float
    """The configured deadline of this wait, seconds."""
    starting: bool = False
    """Whether the run is still starting its processes."""


def numbered(name: str, place: int) -> str:
    """The name of the process of a model's server number `place`, from 0."""
    return f"{name} {place + 1}" if place else name


def busy_engines(pool: "ModelPool") -> tuple[str, ...]:
    """The engines that have requests in flight or load weights."""
    return tuple(numbered(ENGINE, place) for place in pool.traffic.busy)


def waiting(run: "Orchestrator") -> Waiting:
    """What the orchestrator waits for.

    Progress is: a reply of the policy, a rollout, a group, a batch that was shipped, a step that was trained, a version
    that was loaded.
    """
    sync, pool, groups = run.weight_sync, run.pool, list(run.dispatcher.in_flight)
    arrived = sum(len(group.rollouts) for group in groups)
    engines = busy_engines(pool)
    to_load = len(engines) if pool.loading is not None else 0
    of_policy = (pool.version, to_load, pool.answered)
    done = (sync.shipped, sync.announced, *of_policy, arrived, len(groups), run.batcher.rollouts)
    if pool.loading is not None:
        what = f"the orchestrator waits for the engine to load policy version {pool.loading}"
        return Waiting(what, engines, done, sync.update_timeout_s)
    asked = pool.requests_in_flight
    if sync.busy:
        source = f"{asked} replies from the engine" if asked else "its tools and graders"
        what = f"the evaluation of policy version {pool.version} waits for {source}"
        return Waiting(what, engines, done, run.config.batch_timeout_s)
    if groups:
        missing = Counter[str]()
        for group in groups:
            missing[group.env.name] += group.env.rollouts_per_group - len(group.rollouts)
        of = ", ".join(f"{count} rollouts of env {name}" for name, count in missing.items() if count)
        source = f"from the engine ({asked} requests)" if asked else "from other models, tools and graders"
        what = f"the orchestrator waits for {of or f'the scores of {arrived} rollouts'} {source}"
        return Waiting(what, engines, done, run.config.batch_timeout_s)
    what = f"the orchestrator waits for policy version {sync.announced + 1} from the trainer"
    return Waiting(what, (TRAINER,), done, run.config.policy_timeout_s)
