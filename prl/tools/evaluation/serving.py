"""The models of an evaluation, served one after the other: one engine loads every checkpoint of the same shape."""

import functools
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from prl.base.text import as_message
from prl.config.build import build
from prl.config.evaluation import EvaluationConfig
from prl.engines.client import ModelPool, PolicyPool
from prl.engines.frozen import FrozenPool
from prl.engines.servers import tracks_of
from prl.launch.launcher import Launcher
from prl.launch.local import resolve_model
from prl.launch.specs import policy_pool, restarts_of, run_token
from prl.launch.supervisor import Supervisor
from prl.orchestrator.who_waits import Waiting
from prl.tools.evaluation.targets import Target

Work = Callable[[Target, ModelPool], Awaitable[None]]


async def serve_each(config: EvaluationConfig, engines: Iterable[list[Target]], log: Path, work: Work) -> None:
    """Have each target served, and `work` done on it. An engine that dies ends it with its name and last log lines."""
    for group in engines:
        with build(config.launcher, Launcher, "launcher") as launcher:
            endpoint = group[0].endpoint
            pool = start(config, group[0], launcher, log) if endpoint is None else FrozenPool(endpoint)
            timeout_s = config.engine.startup_timeout_s if endpoint is None else endpoint.timeout_s
            restarts = restarts_of(config.engine) if endpoint is None and not config.engine.urls else {}
            supervisor = Supervisor(launcher, say, restarts, config.engine.startup_timeout_s)
            try:
                with supervisor.awaiting(f"the model to answer at {', '.join(pool.urls)}", tracks_of(len(pool.urls))):
                    await supervisor.guard(pool.wait_ready(timeout_s, launcher.ensure_alive))
                supervisor.serve(pool)
                await supervisor.guard(_each(config, group, pool, work), functools.partial(waiting, pool))
            finally:
                await pool.close()


def waiting(pool: ModelPool) -> Waiting:
    """Return what an evaluation, or a chat, waits for."""
    asked = pool.requests_in_flight
    what = f"{asked} requests wait for the model" if asked else "nothing is asked of the model"
    done = pool.answered if asked else object()  # a person who thinks is no lack of progress
    return Waiting(what, done)


def say(text: str) -> None:
    """Show a line to the person who watches."""
    print(as_message(text), file=sys.stderr, flush=True)


def start(config: EvaluationConfig, target: Target, launcher: Launcher, log: Path) -> PolicyPool:
    """A client of the engines of `engine.urls`, or of those that are started with the target's model."""
    if config.engine.servers and not config.engine.urls:
        several = "an engine" if config.engine.servers == 1 else f"{config.engine.servers} engines"
        print(f"starting {several} for {target.name}; log: {log}", file=sys.stderr, flush=True)
    return policy_pool(config, target.model, launcher, run_token(config), log)


async def _each(config: EvaluationConfig, group: list[Target], pool: ModelPool, work: Work) -> None:
    for version, target in enumerate(group):
        if isinstance(pool, PolicyPool) and (version > 0 or config.engine.urls):
            path = str(resolve_model(target.model, "cpu").path)
            await pool.update_weights(version, path, config.engine.update_timeout_s)
        await work(target, pool)
