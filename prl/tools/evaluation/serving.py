"""The models of an evaluation, served one after the other: one engine loads every checkpoint of the same shape."""

import functools
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from prl.base.text import as_message
from prl.engines.client import ModelPool, PolicyPool
from prl.engines.frozen import FrozenPool
from prl.engines.servers import tracks_of
from prl.launch.launcher import Launcher
from prl.launch.plan import ModelPlan, resolved
from prl.launch.supervisor import Supervisor
from prl.orchestrator.who_waits import Waiting
from prl.rollouts.pictures import PictureStore
from prl.tools.evaluation.targets import Target

Work = Callable[[Target, ModelPool], Awaitable[None]]


@dataclass(frozen=True)
class Served:
    """The targets that one engine, or one endpoint, serves one after the other."""

    targets: list[Target]
    plan: ModelPlan | None
    """The engine; None = they are at an endpoint."""
    pictures: PictureStore | None = None
    """The store of the pictures that they are shown; None = they see none."""


async def serve_each(make_launcher: Callable[[], Launcher], engines: Iterable[Served], work: Work) -> None:
    """Have each target served, and `work` done on it. An engine that dies ends it with its name and last log lines."""
    for served in engines:
        # One for each engine, whose memory is free before the next one starts.
        with make_launcher() as launcher:
            pool, timeout_s = client_of(served, launcher)
            restarts = {} if served.plan is None else served.plan.restarts
            supervisor = Supervisor(launcher, say, restarts, timeout_s)
            try:
                with supervisor.awaiting(f"the model to answer at {', '.join(pool.urls)}", tracks_of(len(pool.urls))):
                    await supervisor.guard(pool.wait_ready(timeout_s, launcher.ensure_alive))
                supervisor.serve(pool)
                await supervisor.guard(_each(served, pool, work), functools.partial(waiting, pool))
            finally:
                await pool.close()


def client_of(served: Served, launcher: Launcher) -> tuple[ModelPool, float]:
    """A client of targets, whose engine is started unless it runs, and the deadline for it to answer, seconds."""
    plan, first = served.plan, served.targets[0]
    if plan is None:
        assert first.endpoint is not None
        return FrozenPool(first.endpoint, pictures=served.pictures), first.endpoint.timeout_s
    if plan.servers:
        several = "an engine" if len(plan.servers) == 1 else f"{len(plan.servers)} engines"
        print(f"starting {several} for {first.name}; log: {plan.spec.log}", file=sys.stderr, flush=True)
    return plan.policy(launcher.start_engine, pictures=served.pictures), plan.spec.config.startup_timeout_s


def waiting(pool: ModelPool) -> Waiting:
    """Return what an evaluation, or a chat, waits for."""
    asked = pool.requests_in_flight
    what = f"{asked} requests wait for the model" if asked else "nothing is asked of the model"
    done = pool.answered if asked else object()  # a person who thinks is no lack of progress
    return Waiting(what, done)


def say(text: str) -> None:
    """Show a line to the person who watches."""
    print(as_message(text), file=sys.stderr, flush=True)


async def _each(served: Served, pool: ModelPool, work: Work) -> None:
    for version, target in enumerate(served.targets):
        # An engine that was started has its first target's weights; one that runs already may have any.
        if served.plan is not None and (version > 0 or served.plan.urls):
            assert isinstance(pool, PolicyPool)
            path = resolved(target.model, served.plan.spec.device).path
            await pool.update_weights(version, path, served.plan.spec.config.update_timeout_s)
        await work(target, pool)
