"""Train a policy.

    python -m prl.train [group=option …] [key=value …]
    python -m prl.train -m seed=0,1,2          a sweep: one run directory each

From Python: `prl.train.main(config)` with a `TrainConfig` (see `prl.compose.compose`).
"""

import asyncio
import contextlib
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from prl.compose import CONF, to_config
from prl.config import suggestions
from prl.config.schema import TrainConfig
from prl.config.validate import check
from prl.errors import ConfigError, PrlError
from prl.orchestrator.algo.check import check_algorithms
from prl.run_dir import log_to, new_run_dir, refuse_existing, write_result

if TYPE_CHECKING:
    from prl.inference.client import InferencePool
    from prl.launch.builder import RunBuilder
    from prl.monitors.monitor import Monitor


def main(config: TrainConfig) -> dict[str, Any]:
    """One run, from the config to its `result.json`, whose content is returned.

    Raises ConfigError before anything has started, PrlError when the run failed, KeyboardInterrupt when it was stopped.
    """
    check(config)
    check_algorithms(config)
    refuse_existing(Path(config.run.dir))
    from prl.launch.builder import RunBuilder  # verifiers and transformers are imported once the config has passed

    parts = RunBuilder.load(config)
    run_dir = new_run_dir(config)
    print(f"run directory: {run_dir}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        "status": "failed",
        "error": None,
        "ended_because": None,
        "steps": 0,
        "seconds": 0.0,
        "metrics": {},
    }
    started = time.monotonic()
    try:
        asyncio.run(until_signal(run(parts, run_dir, result)))
        result["status"] = "completed"
    except (KeyboardInterrupt, asyncio.CancelledError):
        result |= {"status": "stopped", "error": "interrupted"}
        raise KeyboardInterrupt from None
    except BaseException as error:
        result["error"] = str(error) if isinstance(error, PrlError) else "".join(traceback.format_exception(error))
        raise
    finally:
        result["seconds"] = round(time.monotonic() - started, 3)
        write_result(run_dir, result)
    return result


async def run(parts: "RunBuilder", run_dir: Path, result: dict[str, Any]) -> None:
    """The story of a run."""
    from prl.launch.supervisor import Supervisor
    from prl.monitors.monitor import Monitor

    log_to(run_dir / "logs" / "orchestrator.log")
    config = parts.config
    plain = OmegaConf.to_container(OmegaConf.structured(config))
    monitor = Monitor(config.monitor, run_dir, max_steps=config.max_steps, run_config=plain)
    with contextlib.closing(monitor), Supervisor() as processes:
        monitor.status("starting the engine and the trainer")
        pool = await parts.start(processes, run_dir)
        try:
            monitor.status("training")
            orchestrator = parts.orchestrator(pool, monitor, run_dir)
            await first_failure(orchestrator.run(), processes.watch(), pool)
            monitor.status("writing the checkpoint")
            await processes.finish(config.trainer.finish_timeout_s)
            orchestrator.checkpoints.complete(orchestrator.last_step)
            result["ended_because"] = orchestrator.ended_because  # before max_steps; null where it did not
        finally:
            await pool.close()
            record(result, monitor)


async def first_failure(work, watch, pool: "InferencePool") -> None:
    """Run `work` to its end unless `watch` fails first."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(watch)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # A dying process also breaks the requests to it: its own name and log say more than they do.
        if tasks[0] in done and tasks[0].exception() is not None and tasks[1] not in done:
            await asyncio.wait(tasks[1:], timeout=10.0 if pool.ailing else 1.0)  # a dying engine takes its time
        for task in reversed(tasks):
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_signal(work) -> None:
    """Run `work`; SIGINT and SIGTERM cancel it, so that everything is shut down in order."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def record(result: dict[str, Any], monitor: "Monitor") -> None:
    result["steps"] = int(monitor.last.get("step", 0))
    result["metrics"] = {key: value for key, value in monitor.last.items() if key != "step"}


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def _job(cfg: DictConfig) -> float | None:
    """One Hydra job. Returns the final mean reward, for sweepers."""
    suggestions.job_started()
    job = HydraConfig.get()
    cfg.run.dir = job.runtime.output_dir
    try:
        result = main(to_config(cfg))
    except PrlError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            Path(cfg.run.dir).rmdir()  # Hydra has made it; a refused config leaves nothing behind
        if job.mode == hydra.types.RunMode.MULTIRUN:
            raise  # Hydra marks the job as failed and goes on with the sweep
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    metrics = result["metrics"]
    summary = ", ".join(f"{key} {metrics[key]:.3f}" for key in metrics if key == "reward/all/mean" or "avg@" in key)
    print(f"completed {result['steps']} steps in {result['seconds']:.0f} s: {summary}", file=sys.stderr)
    print(f"look at: {cfg.run.dir}", file=sys.stderr, flush=True)
    return metrics.get("reward/all/mean")


def cli() -> None:
    suggestions.run(_job, sys.argv[1:], CONF)


if __name__ == "__main__":
    cli()
