"""Train a policy.

    python -m prl.train [group=option …] [key=value …]
    python -m prl.train -m seed=0,1,2          a sweep: one run directory each (conf/sweep/README.md)
    python -m prl.train experiment=lora        another, which the experiment describes
    python -m prl.train … dry_run=true         starts nothing: what the run would start, and whether it fits

From Python: `prl.train.main(config)` with a `TrainConfig` (see `prl.config.compose.compose`).
"""

import asyncio
import contextlib
import functools
import gc
import logging
import multiprocessing.spawn
import sys
from dataclasses import replace
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from prl.base import checkpoint_folders
from prl.base.errors import NoSignal, of_disk
from prl.base.metric_names import SAMPLED, held_out
from prl.base.text import safe
from prl.config.build import build, located
from prl.config.compose import CONF, to_config, typed
from prl.config.hardware import assuming
from prl.config.run_yaml import data_of
from prl.config.schema import TrainConfig
from prl.config.validate import places_processes, validate
from prl.launch import command, specs
from prl.launch.children import leave_none
from prl.launch.launcher import Launcher, ProcessDied
from prl.launch.signals import run_to_end
from prl.launch.slurm import SlurmLauncher
from prl.monitors.log import hold_log, log_to
from prl.runs import resume
from prl.runs.owner import owned, refuse_owned
from prl.runs.provenance import write_provenance
from prl.runs.result import RunResult, write_result
from prl.runs.run_dir import (
    absolute,
    holds_run,
    last_metrics,
    new_run_dir,
    recorded,
    refuse_existing,
    refuse_other_files,
    remove_logs,
)
from prl.tools import report, sweep
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


def main(config: TrainConfig) -> RunResult:
    """One run, from the config to its `result.json`, whose content is returned.

    Raises ConfigError before anything has started, PrlError when the run failed, KeyboardInterrupt when it was stopped.
    A dry run (`dry_run=true`) ends before it begins.
    """
    # Refuses a script that calls this without `if __name__ == "__main__":`, where a process of graders imports it.
    multiprocessing.spawn.get_preparation_data("prl")
    memory = hold_log()
    with assuming(config.machine):
        validate(config)
        with specs.launcher_of(config) as launcher:
            prepared = prepare(config, launcher)
            if isinstance(prepared, RunResult):
                return prepared
            if config.dry_run:
                from prl.launch.prompts import as_read
                from prl.tools.dry_run.plan import dry_run  # torch and transformers, once the config has passed
                from prl.tools.dry_run.rehearsal import rehearse

                rehearse(prepared)
                print("\n".join(map(as_read, prepared.environments.values())))
                dry_run(config)
                return RunResult("dry run")
            return own(prepared, Path(config.run.dir), memory)


def prepare(config: TrainConfig, launcher: Launcher) -> "PreparedRun | RunResult":
    """Return what is left of a run to refuse, or its result where it is completed already. Raises ConfigError.

    This is what a dry run and a run have in common. Only a run starts its engines, which take as long as what follows;
    refused it leaves nothing of theirs behind.
    """
    run_dir = Path(config.run.dir)
    refuse_other_files(run_dir)
    if config.run.resume is None:
        refuse_existing(run_dir)
    elif (result := resume.completed(config)) is not None:
        more = f"max_steps={result.steps + 1} or more"
        how = f"any other setting ({safe(result.ended_because)})" if result.ended_because else more
        print(f"{run_dir} is completed already: {result.steps} steps; it goes on with {how}", file=sys.stderr)
        return result
    refuse_owned(run_dir)
    token = specs.run_token(config)
    absent = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    if launcher.places_processes and not config.dry_run:
        launcher.reserve(specs.bundles_of(config))
    urls = [] if config.dry_run else specs.start_early(config, launcher, token, run_dir)
    try:
        from prl.launch import builder  # verifiers and transformers are imported once the config has passed
        from prl.launch.components import build_components

        point = resume.find(config)
        components = build_components(config, launcher)
        prepared = builder.prepare(config, components, token)
        prepared.resume, prepared.urls = point, urls
        if config.dry_run and point is not None:  # a run looks once nobody else may write there
            resume.check_tasks(point.run_dir, builder.task_keys(prepared))
    except BaseException:
        launcher.stop()
        remove_logs(run_dir, absent)
        raise
    return prepared


def submit(config: TrainConfig, job: SlurmLauncher) -> None:
    """Check a run as a dry run does, and submit the job that is to train it. Raises ConfigError."""
    hold_log()
    with assuming(job.machine(config.machine)):
        validate(config)
        with specs.launcher_of(config) as launcher:
            if not isinstance(prepare(replace(config, dry_run=True), launcher), RunResult):
                job.submit(config, sys.argv[1:])


def own(prepared: "PreparedRun", run_dir: Path, memory: MemoryHandler) -> RunResult:
    """Take the run's directory, run to the end, and leave there what became of it, with the log so far (`memory`)."""
    from prl.launch import builder

    config, point = prepared.config, prepared.resume
    with owned(run_dir):
        if point is None:
            new_run_dir(config)
        else:
            prepared.resume = resume.take_over(point, config, builder.task_keys(prepared))
        log_to(run_dir / "logs" / "orchestrator.log", memory)
        if point is None or point.folder is None or point.forks:
            write_provenance(run_dir, config, builder.task_keys(prepared))
        print(f"run directory: {run_dir}", file=sys.stderr, flush=True)
        result = RunResult()
        if places_processes(config):  # Ray ends a process that has lost its head, before Python can do anything
            write_result(run_dir, RunResult(error=ENDED_BY_RAY))
        try:
            with recorded(run_dir, result):
                run_to_end(run(prepared, run_dir, result))
        finally:
            if holds_run(run_dir):
                report.try_to_write(run_dir)
            if result.status != "completed" and checkpoint_folders.steps_of(run_dir):
                print(f"go on with: {resume.going_on(run_dir)}", file=sys.stderr)
    return result


async def run(prepared: "PreparedRun", run_dir: Path, result: RunResult) -> None:
    """The story of a run: start the servers, train, wait for the last checkpoint."""
    from prl.launch import builder

    config, monitors, point = prepared.config, prepared.components.monitors, prepared.resume
    first = point.step if point is not None else 0
    monitors.start(run_dir, max_steps=config.max_steps, run_config=data_of(config), resumed_at=first)
    if first:
        monitors.last |= last_metrics(run_dir)
    track = Track(events.ORCHESTRATOR, run_dir)
    launcher = prepared.components.launcher
    transport = launcher.transport(run_dir, prepared.components.weights)
    prepared.components.weights.attach(transport)
    with contextlib.closing(track), contextlib.closing(monitors), contextlib.ExitStack() as processes:
        processes.callback(transport.close)
        processes.callback(launcher.stop)  # before the monitors hear the end; entered it was by `main`
        with track.doing(events.PREPARING, first):
            monitors.status(f"starting {'' if config.engine.urls else 'the engine and '}the trainer")
            supervisor = builder.supervise(prepared, track)
        with track.doing(events.PROCESSES, first):
            servers = await supervisor.guard(builder.start_services(prepared, supervisor, transport, run_dir))
        orchestrator = None
        try:
            set_loaded_apart(processes)
            with track.doing(events.ASSEMBLING, first):
                orchestrator = builder.assemble(prepared, servers, transport, run_dir, track)
                servers.policy.traffic.record(track)
            monitors.status("training")
            ended_because = await train_and_keep(orchestrator, supervisor, config.trainer.finish_timeout_s)
            monitors.status("writing the checkpoint")
            with track.doing(events.LAST_CHECKPOINT, track.step):
                await supervisor.finish(config.trainer.finish_timeout_s)
            orchestrator.finish()
            result.ended_because = ended_because
        except asyncio.CancelledError:
            if orchestrator is not None and config.checkpoint.grace_s:
                await supervisor.last_checkpoint(orchestrator.end, config.checkpoint.grace_s)
            raise
        finally:
            result.take(monitors.last)
            if orchestrator is not None:
                try_to_finish(orchestrator)
            await servers.close()


async def train_and_keep(orchestrator: "Orchestrator", supervisor: "Supervisor", timeout_s: float) -> str | None:
    """Train to the end, as `Orchestrator.run` does. Where that fails, the trainer writes a last checkpoint.

    Not where the trainer itself has failed, where the last step has a checkpoint already, or where somebody has removed
    the run's directory. What keeps it from that is logged: the error that came first is raised.
    """
    from prl.orchestrator.who_waits import waiting

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


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def _job(cfg: DictConfig) -> float | None:
    """One Hydra job. Returns the optimised metric to a sweeper, None to nobody."""
    job = HydraConfig.get()
    if job.mode == hydra.types.RunMode.MULTIRUN:
        with command.errors_as_exit_codes():
            return sweep.job.run_job(cfg, main)
    with command.errors_as_exit_codes():
        resume.check_named(cfg)
        config = to_config(TrainConfig, cfg, typed(job))
        config.run.dir = absolute(config.run.dir)
        if getattr(located(config.launcher, "launcher"), "submits", False):
            slurm = build(config.launcher, SlurmLauncher, "launcher")
            config.launcher = slurm.in_job
            if not config.dry_run:
                submit(config, slurm)
                return None
        result = main(config)
    if config.dry_run:
        return None
    rewards = {key: value for key, value in result.metrics.items() if key == SAMPLED} | held_out(result.metrics)
    summary = ", ".join(f"{key} {value:.3f}" for key, value in rewards.items() if value is not None)
    print(f"completed {result.steps} steps in {result.seconds:.0f} s: {summary}", file=sys.stderr)
    if overlap := report.try_to_sum_up(Path(config.run.dir)):
        print(overlap, file=sys.stderr)
    print(f"look at: {config.run.dir}", file=sys.stderr, flush=True)
    return None


if __name__ == "__main__":
    leave_none()
    with command.errors_as_exit_codes():
        arguments = resume.expanded(sys.argv[1:])
    sweep.command.run(_job, arguments)
