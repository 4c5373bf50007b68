"""What a run's processes are started as, from its config alone; with none of the imports that preparing a run takes."""

import os
import secrets
from pathlib import Path
from typing import Any

from prl.config.evaluation import EvaluationConfig
from prl.config.instantiate import build
from prl.config.schema import ModelConfig, TrainConfig
from prl.config.validate import resolve_device
from prl.errors import ConfigError
from prl.inference.server import TOKEN_VARIABLE
from prl.launch import threads, warm
from prl.launch.launcher import EngineSpec, Launcher, TrainerSpec
from prl.launch.local import resolve_model

POLICY_NAME = "policy"
"""Name that engines serve the policy under."""


def launcher_of(config: TrainConfig) -> Launcher:
    """The run's launcher. Raises ConfigError."""
    if config.sweep.share_engine:
        return warm.WarmLauncher(config.launcher)
    return build(config.launcher, Launcher, "launcher")


def run_token(config: TrainConfig | EvaluationConfig) -> str:
    """A fresh token for this run's servers, or the one that running or warm engines were started with."""
    if not config.inference.urls:
        shares = isinstance(config, TrainConfig) and config.sweep.share_engine
        return warm.TOKEN if shares else secrets.token_hex(24)
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigError(f"inference.urls names servers that already run: set {TOKEN_VARIABLE} to their token")
    return os.environ[TOKEN_VARIABLE]


def engine_log(run_dir: Path) -> Path:
    """Where the output of a run's engine goes."""
    return run_dir / "logs" / "inference.log"


def policy_engine(config: TrainConfig | EvaluationConfig, model: ModelConfig, token: str, log: Path) -> EngineSpec:
    """The engine of a policy: the one that a run trains, or one that an evaluation asks."""
    device = resolve_device(config.inference.device)
    return EngineSpec(
        process="inference",
        served_name=POLICY_NAME,
        model=resolve_model(model, device),
        config=config.inference,
        device=device,
        seed=config.seed,
        token=token,
        log=log,
        threads=threads.of_engine(config, model),
    )


def trainer(config: TrainConfig, run_dir: Path, payload: dict[str, Any] | None = None) -> TrainerSpec:
    """The trainer; without its `payload` for `Launcher.import_ahead`."""
    return TrainerSpec(
        run_dir=run_dir,
        model=resolve_model(config.model, resolve_device(config.inference.device)),
        payload=payload or {},
        num_processes=config.trainer.num_processes,
        threads=threads.of_trainer(config),
    )
