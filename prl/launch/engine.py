"""Start one policy server under the supervisor."""

from pathlib import Path
from typing import Any

from prl.inference.auth import TOKEN_VARIABLE
from prl.inference.config import InferenceConfig, server_command, server_environment
from prl.launch.processes import Process, Supervisor, free_port


def start_engine(
    processes: Supervisor, config: InferenceConfig, model: dict[str, Any], *, device: str, token: str, seed: int, log: Path
) -> tuple[str, Process]:
    """Start a server for `model` (a resolved model node); returns its URL before it is ready, and its process."""
    port = config.port or free_port(config.host)
    command = server_command(config, model=model, device=device, port=port, seed=seed)
    env = server_environment(config, device) | model_environment(model) | {TOKEN_VARIABLE: token}
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{port}", processes.start("inference", command, env=env, log=log)


def model_environment(model: dict[str, Any]) -> dict[str, str]:
    """Environment variables of every process that loads the model."""
    env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if Path(model["path"]).is_dir():
        env["HF_HUB_OFFLINE"] = "1"  # a local folder needs nothing from the hub, and asking takes its time-outs
    return env
