"""Start a model server under the supervisor."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from prl.config.schema import ModelConfig
from prl.inference.auth import TOKEN_VARIABLE
from prl.inference.config import InferenceConfig, server_command, server_environment
from prl.inference.server import FROZEN_VARIABLE
from prl.launch.supervisor import Process, Supervisor, free_port


def start_engine(
    processes: Supervisor,
    config: InferenceConfig,
    model: dict[str, Any],
    *,
    device: str,
    token: str,
    seed: int,
    log: Path,
    frozen: str | None = None,
) -> tuple[str, Process]:
    """Start a server of `model` (a resolved model node); returns its URL before it is ready, and its process.

    It serves the policy, or a model `frozen` under this name, which takes no weights. Raises PrlError for an address that
    it cannot have.
    """
    name, process = ("policy", "inference") if frozen is None else (frozen, "teacher")
    port = free_port(config.host, config.port)
    command = server_command(config, model=model, device=device, port=port, seed=seed, name=name)
    env = server_environment(config, device) | model_environment(model) | {TOKEN_VARIABLE: token}
    env[FROZEN_VARIABLE] = "" if frozen is None else "1"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{port}", processes.start(process, command, env=env, log=log)


def resolve_model(config: ModelConfig, device: str) -> dict[str, Any]:
    """The model node with what depends on this machine filled in: an absolute path, the engine's number format."""
    model = asdict(config)
    if Path(model["path"]).expanduser().is_dir():
        model["path"] = str(Path(model["path"]).expanduser().resolve())
    if model["dtype"] == "auto":
        model["dtype"] = "float32" if device == "cpu" else "bfloat16"
    return model


def model_environment(model: dict[str, Any]) -> dict[str, str]:
    """Environment variables of every process that loads the model."""
    env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if Path(model["path"]).is_dir():
        env["HF_HUB_OFFLINE"] = "1"  # a local folder needs nothing from the hub, and asking takes its time-outs
    return env
