"""Train a policy.

    python -m prl.train [group=option …] [key=value …]
    python -m prl.train -m seed=0,1,2          a sweep: one run directory each

From Python: `prl.train.main(config)` with a `TrainConfig` (see `prl.train.compose`).
"""

import asyncio
import contextlib
import difflib
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from prl import schemas
from prl.config import hints
from prl.config.build import with_nodes
from prl.config.check import check
from prl.config.errors import ConfigError, PrlError
from prl.config.schema import TrainConfig
from prl.orchestrator.algo.check import check_algorithms

if TYPE_CHECKING:
    from prl.inference.client import InferencePool
    from prl.launch.parts import Parts
    from prl.monitors.monitor import Monitor

PACKAGE = Path(__file__).parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # in a wheel, in a checkout

schemas.register()


def main(config: TrainConfig) -> dict[str, Any]:
    """One run, from the config to its `result.json`, whose content is returned.

    Raises ConfigError before anything has started, PrlError when the run failed, KeyboardInterrupt when it was stopped.
    """
    check(config)
    check_algorithms(config)
    refuse_existing(Path(config.run.dir))
    from prl.launch.parts import Parts  # verifiers and transformers are imported once the config has passed

    parts = Parts.load(config)
    run_dir = new_run_dir(config)
    print(f"run directory: {run_dir}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        "status": "failed", "error": None, "ended_because": None, "steps": 0, "seconds": 0.0, "metrics": {},
    }  # fmt: skip
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


async def run(parts: "Parts", run_dir: Path, result: dict[str, Any]) -> None:
    """The story of a run."""
    from prl.launch.processes import Supervisor
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


def refuse_existing(run_dir: Path) -> None:
    """Raise ConfigError for a directory that holds a run."""
    if any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "result.json")):
        raise ConfigError(f"run.dir={str(run_dir)!r} already holds a run: choose another run.name, or remove it")


def new_run_dir(config: TrainConfig) -> Path:
    """Make the run directory and write the resolved config into it."""
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(config), run_dir / "config.yaml")
    if HydraConfig.initialized():
        save_hydra(run_dir / ".hydra")
    return run_dir


def save_hydra(folder: Path) -> None:
    """What Hydra would have written, had it been let before the directory was checked."""
    folder.mkdir(exist_ok=True)
    hydra_config = HydraConfig.get()
    OmegaConf.save(hydra_config, folder / "hydra.yaml")
    OmegaConf.save(OmegaConf.create(list(hydra_config.overrides.task)), folder / "overrides.yaml")


def record(result: dict[str, Any], monitor: "Monitor") -> None:
    result["steps"] = int(monitor.last.get("step", 0))
    result["metrics"] = {key: value for key, value in monitor.last.items() if key != "step"}


def write_result(run_dir: Path, result: dict[str, Any]) -> None:
    import msgspec

    from prl.wire.files import write_atomically

    write_atomically(run_dir / "result.json", msgspec.json.format(msgspec.json.encode(result)) + b"\n")


def log_to(path: Path) -> None:
    """Logging of this process to `path`; warnings to the terminal as well."""
    import logging

    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_terminal = logging.StreamHandler()
    to_terminal.setLevel(logging.WARNING)
    to_terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)
    logging.captureWarnings(True)
    for noisy in ("httpx", "aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def to_config(cfg: DictConfig) -> Any:
    """The typed config of a composed one: a TrainConfig, or what else its root schema is."""
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"{missing[0]} has no value: give one, {missing[0]}=<value>")
    refuse_appended(cfg)
    return with_nodes(OmegaConf.to_object(cfg))


def refuse_appended(cfg: DictConfig, where: str = "") -> None:
    """Raise ConfigError for a key that `+key=value` added beside those of a schema: nothing would ever read it."""
    schema = OmegaConf.get_type(cfg)
    fields = getattr(schema, "__dataclass_fields__", None)
    for name in cfg:
        key = f"{where}{name}"
        if fields is not None and name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"keys there: {', '.join(sorted(fields))}"
            raise ConfigError(f"{key}: there is no such key in {schema.__name__}; {hint}")
        if isinstance(child := cfg._get_node(name), DictConfig) and not child._is_none():
            refuse_appended(child, f"{key}.")


def compose(overrides: list[str]) -> TrainConfig:
    """The config that `python -m prl.train <overrides>` would use; `run.name` must be among the overrides."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(hydra.compose("train", overrides))


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def _job(cfg: DictConfig) -> float | None:
    """One Hydra job. Returns the final mean reward, for sweepers."""
    hints.job_started()
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
    hints.run(_job, sys.argv[1:], CONF)


if __name__ == "__main__":
    cli()
