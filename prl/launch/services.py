"""Start the servers and the trainer of a run, and wait until they are ready."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.config.instantiate import plain
from prl.config.model_reference import FrozenModel
from prl.config.schema import TrainConfig
from prl.config.validate import resolve_device
from prl.errors import PrlError
from prl.inference.client import InferencePool
from prl.inference.frozen import FrozenPool
from prl.launch.builder import PreparedRun
from prl.launch.launcher import EngineSpec, Launcher, TrainerSpec
from prl.launch.local import resolve_model
from prl.wire.transport import Transport


@dataclass
class Services:
    """What runs beside the orchestrator."""

    policy: InferencePool
    """The client of the policy's engines."""
    hosted: dict[str, FrozenModel]
    """The frozen models that the launcher serves for the run, by name."""


async def start_services(run: PreparedRun, launcher: Launcher, transport: Transport, run_dir: Path) -> Services:
    """Start the engine, the trainer and a hosted teacher side by side; return when all are ready."""
    config, token, logs = run.config, run.token, run_dir / "logs"
    urls = config.inference.urls or [launcher.start_engine(policy_engine(run, logs / "inference.log"))]
    ready = []
    hosted: dict[str, FrozenModel] = {}
    if run.components.hosted:
        hosted[config.teacher.name] = start_teacher(config, launcher, token, logs / "teacher.log")
        ready.append(wait_for_teacher(hosted[config.teacher.name], config, launcher))
    launcher.start_trainer(trainer_spec(run, run_dir))
    ready.append(wait_for_trainer(run, transport, launcher))
    policy = InferencePool(urls, "policy", token)
    try:
        await asyncio.gather(policy.wait_ready(config.inference.startup_timeout_s, launcher.ensure_alive), *ready)
        if config.inference.urls:  # an engine that ran before may hold another run's weights
            await policy.update_weights(0, run.model.path, config.inference.update_timeout_s)
    except BaseException:
        await policy.close()
        raise
    return Services(policy, hosted)


def policy_engine(run: PreparedRun, log: Path) -> EngineSpec:
    """The policy's engine as the launcher starts it."""
    return EngineSpec(
        process="inference",
        served_name="policy",
        model=run.model,
        config=run.config.inference,
        device=run.engine_device,
        seed=run.config.seed,
        token=run.token,
        log=log,
    )


def start_teacher(config: TrainConfig, launcher: Launcher, token: str, log: Path) -> FrozenModel:
    """Start the server of the hosted teacher; returns the reference that its users connect to."""
    teacher = config.teacher
    if teacher.model is None:
        raise ValueError("teacher.model is null: there is no teacher to host")
    device = resolve_device(teacher.inference.device)
    url = launcher.start_engine(
        EngineSpec(
            process="teacher",
            served_name=teacher.name,
            model=resolve_model(teacher.model, device),
            config=teacher.inference,
            device=device,
            seed=config.seed,
            token=token,
            log=log,
            frozen=True,
        )
    )
    return FrozenModel(name=teacher.name, base_url=f"{url}/v1", timeout_s=teacher.timeout_s, token=token)


async def wait_for_teacher(teacher: FrozenModel, config: TrainConfig, launcher: Launcher) -> None:
    """Wait until the hosted teacher answers. Raises DeadlinePassed naming it."""
    pool = FrozenPool(teacher, teacher.token)
    try:
        await pool.wait_ready(config.teacher.inference.startup_timeout_s, launcher.ensure_alive)
    finally:
        await pool.close()


def trainer_spec(run: PreparedRun, run_dir: Path) -> TrainerSpec:
    """The trainer as the launcher starts it."""
    config = run.config
    payload: dict[str, Any] = {
        "model": plain(run.model),
        "losses": {name: plain(node) for name, node in run.components.losses.items()},
        "trainer": plain(config.trainer) | {"device": run.trainer_device},
        "transport": plain(config.transport),
        "seed": config.seed,
        "max_steps": config.max_steps,
    }
    return TrainerSpec(
        run_dir=run_dir,
        model=run.model,
        payload=payload,
        num_processes=config.trainer.num_processes,
        log=run_dir / "logs" / "trainer.log",
    )


async def wait_for_trainer(run: PreparedRun, transport: Transport, launcher: Launcher) -> None:
    """Wait until the trainer has loaded the model. Raises PrlError at the deadline."""
    timeout_s = run.config.trainer.ready_timeout_s
    deadline = time.monotonic() + timeout_s
    while transport.receive_metrics(0) is None:
        launcher.ensure_alive()
        if time.monotonic() > deadline:
            raise PrlError(
                f"the trainer had not loaded {run.model.path} after {timeout_s:g} s (trainer.ready_timeout_s)"
            )
        await asyncio.sleep(0.05)
