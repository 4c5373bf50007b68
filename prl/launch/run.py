"""The life of a training run: what is refused, the run itself, and what is left of it at its end."""

import asyncio
import contextlib
import functools
import gc
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING

from prl.base import checkpoint_folders, garbage
from prl.base.errors import NoSignal, PrlError, of_disk
from prl.base.text import safe
from prl.config.run_yaml import data_of, text_of
from prl.config.schema import TrainConfig
from prl.launch import resume
from prl.launch.checks import check_weights
from prl.launch.launcher import Launcher, ProcessDied
from prl.launch.plan import RunPlan
from prl.launch.signals import run_to_end
from prl.monitors.log import log_to
from prl.orchestrator.who_waits import waiting
from prl.rollouts.pictures import FOLDER
from prl.runs.owner import owned, refuse_owned
from prl.runs.provenance import write_provenance
from prl.runs.result import RunResult, write_result
from prl.runs.run_dir import (
    holds_run,
    last_metrics,
    new_run_dir,
    recorded,
    refuse_existing,
    refuse_other_files,
    remove_early,
)
from prl.transport import events
from prl.transport.events import Track

if TYPE_CHECKING:
    from prl.launch.builder import PreparedRun
    from prl.launch.supervisor import Supervisor
    from prl.orchestrator.orchestrator import Orchestrator

log = logging.getLogger(__name__)

ENDED_BY_RAY = "the command ended without a word: it was killed, or Ray's head is lost; run.resume goes on"
"""The error of a run on Ray for as long as it has not ended otherwise."""
YOUNG = 50_000
"""Objects that a run makes between two garbage collections: those of about two steps of 256 short rollouts."""


@dataclass(frozen=True)
class Start:
    """The processes of a run that are started before it is prepared."""

    began: float
    """When the command began (`time.monotonic`)."""
    engines: list[str]
    """The addresses of the policy's engines; none where they start later."""


# --- before it begins -------------------------------------------------------------------------------------------------


@garbage.loading()
def prepare(config: TrainConfig, plan: RunPlan, launcher: Launcher) -> "tuple[PreparedRun, Start] | RunResult":
    """Refuse what is left to refuse of a planned run. Raises ConfigError.

    A dry run and a run have this in common. Only a run starts its engines, whose start takes as long as the checks that
    follow. If the run is refused nevertheless, they are stopped and their logs removed.

    Args:
        config: A config that has passed `validate`.
        plan: Its plan.
        launcher: Starts the engines.

    Returns:
        The run and what of it has been started; or its result where it is completed already.
    """
    began = time.monotonic()
    run_dir = plan.trainer.run_dir
    launcher.check_plan(plan)
    check_weights(plan, placed=launcher.places_processes, keep_best=config.orchestrator.eval.keep_best)
    refuse_other_files(run_dir)
    if config.run.resume is None:
        refuse_existing(run_dir)
    elif (result := resume.completed(config)) is not None:
        more = f"max_steps={result.steps + 1} or more"
        how = f"any other setting ({safe(result.ended_because)})" if result.ended_because else more
        print(f"{run_dir} is completed already: {result.steps} steps; it goes on with {how}", file=sys.stderr)
        return result
    # It is taken once nothing is left to refuse (`own`).
    refuse_owned(run_dir)
    print("reading the tasks" if plan.is_dry else f"{plan.starting}; reading the tasks", file=sys.stderr, flush=True)
    # What a refused run has made must go again, and nothing else: these are not there yet.
    absent = [folder for folder in (run_dir / FOLDER, run_dir, *run_dir.parents) if not folder.exists()]
    if launcher.places_processes and not plan.is_dry:
        launcher.reserve(plan.bundles)
    engines = [] if plan.is_dry else start_early(plan, launcher)
    try:
        from prl.launch import builder  # verifiers and transformers are imported once the config has passed
        from prl.launch.components import build_components

        point = resume.find(config)
        components = build_components(config)
        prepared = builder.read_tasks(config, plan, components, launcher.place_of_worker, point)
        if plan.is_dry and point is not None:  # a run looks once nobody else may write there
            resume.check_tasks(point.run_dir, builder.task_keys(prepared))
    except BaseException:
        launcher.stop()
        remove_early(run_dir, absent)
        raise
    return prepared, Start(began, engines)


def start_early(plan: RunPlan, launcher: Launcher) -> list[str]:
    """Start the policy's engines and the trainer's imports before the run is prepared.

    Returns the addresses of the engines; none where that goes wrong. The error comes again where they start later,
    once all has been read that may be refused.
    """
    engines: list[str] = []
    with contextlib.suppress(OSError, PrlError, UnicodeError):
        plan.trainer.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if plan.policy.is_started:
            engines = plan.policy.start(launcher.start_engine)
        launcher.warm_trainer(plan.trainer)
    return engines


# --- the run ----------------------------------------------------------------------------------------------------------


def own(
    prepared: "PreparedRun",
    launcher: Launcher,
    start: Start,
    memory: MemoryHandler,
    write_page: Callable[[Path], None],
) -> RunResult:
    """Take the run's directory, run to the end, and leave there what became of it.

    Args:
        prepared: The run.
        launcher: Starts its processes, and has started some.
        start: What of it has been started.
        memory: The log so far, which goes to the run's directory.
        write_page: Writes the page of the run, which has ended.
    """
    from prl.launch import builder

    config, point, run_dir = prepared.config, prepared.resume, prepared.run_dir
    tasks = builder.task_keys(prepared)
    with owned(run_dir):
        if point is None:
            new_run_dir(run_dir, text_of(config))
        else:
            # Only now: nobody else may write there any more (`owned`).
            prepared = replace(prepared, resume=resume.take_over(point, config, tasks))
        log_to(run_dir / "logs" / "orchestrator.log", memory)
        # A run that goes on keeps the provenance that it began with.
        if point is None or point.folder is None or point.forks:
            models = {"model": config.model.path}
            if config.teacher.model is not None:
                models["teacher.model"] = config.teacher.model.path
            write_provenance(run_dir, config.seed, prepared.plan.threads, models, tasks)
        print(f"run directory: {run_dir}", file=sys.stderr, flush=True)
        result = RunResult()
        if launcher.places_processes:  # Ray ends a process that has lost its head, before Python can do anything
            write_result(run_dir, RunResult(error=ENDED_BY_RAY))
        try:
            with recorded(run_dir, result, start.began):
                start_monitors(prepared)
                run_to_end(run(prepared, launcher, start, result))
        finally:
            if holds_run(run_dir):
                write_page(run_dir)
            if result.status != "completed" and checkpoint_folders.steps_of(run_dir):
                print(f"go on with: {resume.going_on(run_dir)}", file=sys.stderr)
    return result


def start_monitors(prepared: "PreparedRun") -> None:
    """Start the monitors, outside of the event loop: W&B waits there for a process of its own, for seconds."""
    config, first, run_dir = prepared.config, prepared.first_version, prepared.run_dir
    last = last_metrics(run_dir) if first else None
    prepared.components.monitors.start(
        run_dir, max_steps=config.max_steps, run_config=data_of(config), resumed_at=first, last=last
    )


async def run(prepared: "PreparedRun", launcher: Launcher, start: Start, result: RunResult) -> None:
    """Start the servers, train, and wait for the last checkpoint.

    Args:
        prepared: The run.
        launcher: Starts its processes, and has started some.
        start: What of it has been started.
        result: Gets the reason of an early end, and the last metrics, however the run ends.
    """
    from prl.launch import builder

    config, monitors, run_dir = prepared.config, prepared.components.monitors, prepared.run_dir
    transport = launcher.transport(run_dir, prepared.components.weights)
    prepared.components.weights.attach(transport)
    first = prepared.first_version
    track = Track(events.ORCHESTRATOR, run_dir)
    with contextlib.closing(track), contextlib.closing(monitors), contextlib.ExitStack() as processes:
        processes.callback(transport.close)
        processes.callback(launcher.stop)  # before the monitors hear the end; entered it was by `main`
        with track.doing(events.PREPARING, first):
            monitors.status(f"tasks read in {time.monotonic() - start.began:.1f} s")
            supervisor = builder.supervise(prepared, launcher, track)
        with track.doing(events.PROCESSES, first):
            servers = await supervisor.guard(builder.start_services(prepared, supervisor, transport, start.engines))
        orchestrator = None
        try:
            set_loaded_apart(processes)
            with track.doing(events.ASSEMBLING, first):
                orchestrator = builder.assemble(prepared, servers, transport, track)
                servers.policy.traffic.record(track)
            monitors.status("training")
            ended_because = await train_and_keep(orchestrator, supervisor, config.trainer.finish_timeout_s)
            monitors.status("writing the checkpoint")
            with track.doing(events.LAST_CHECKPOINT, track.step):
                await supervisor.finish(config.trainer.finish_timeout_s)
            orchestrator.finish()
            result.ended_because = ended_because
        except asyncio.CancelledError:
            # A signal: the trainer gets the time to write what it has, and the end goes on as it was asked for.
            if orchestrator is not None and config.checkpoint.grace_s:
                await supervisor.last_checkpoint(orchestrator.end, config.checkpoint.grace_s)
            raise
        finally:
            # However the run ends, its result has the last metrics.
            result.take(monitors.last)
            if orchestrator is not None:
                try_to_finish(orchestrator)
            await servers.close()


async def train_and_keep(orchestrator: "Orchestrator", supervisor: "Supervisor", timeout_s: float) -> str | None:
    """Train to the end, as `Orchestrator.run` does. Where that fails, the trainer writes a last checkpoint.

    Not where the trainer itself has failed, where the last step has a checkpoint already, or where somebody has removed
    the run's directory. What keeps it from that is logged: the error that came first is raised.
    """
    try:
        return await supervisor.guard(orchestrator.run(), functools.partial(waiting, orchestrator))
    except Exception as error:
        trainer_died = isinstance(error, ProcessDied) and error.process.startswith(events.TRAINER)
        worth_it = orchestrator.unsaved and holds_run(orchestrator.run_dir) and not trainer_died
        if isinstance(error, NoSignal) or worth_it:
            try:
                await supervisor.last_checkpoint(orchestrator.end, timeout_s, "the run fails")
            except (Exception, asyncio.CancelledError) as second:
                log.warning("no last checkpoint: %s", of_disk(second) or second)
        raise


def set_loaded_apart(until: contextlib.ExitStack) -> None:
    """Leave what is loaded out of garbage collections: each would stop all requests for .6 s, at 600,000 objects.

    Others come once in `YOUNG` new objects, which live for some steps and seldom leave cycles: a tenth of the time.
    """
    until.callback(gc.set_threshold, *gc.get_threshold())
    until.callback(gc.unfreeze)
    gc.freeze()
    gc.set_threshold(YOUNG)


def try_to_finish(orchestrator: "Orchestrator") -> None:
    """Complete the last checkpoint of a run that may have failed: why it did comes first, this is a warning."""
    try:
        orchestrator.finish()
    except Exception as error:
        log.warning("no last checkpoint: %s", of_disk(error) or error)
