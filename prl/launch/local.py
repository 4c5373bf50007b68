"""The launcher for one machine: every process of the run is a child of this one."""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from prl.config.schema import ModelConfig
from prl.inference.auth import TOKEN_VARIABLE
from prl.inference.config import server_command, server_environment
from prl.inference.server import FROZEN_VARIABLE
from prl.launch.launcher import EngineSpec, Launcher, TrainerSpec
from prl.launch.supervisor import Supervisor, free_port


@dataclass(kw_only=True)
class LocalLauncher(Launcher):
    """Starts engine and trainer as children of this process, under a reaper each (`prl.reaper`)."""

    supervisor: Supervisor = field(default_factory=Supervisor, init=False, repr=False)

    def start_engine(self, spec: EngineSpec) -> str:
        host = spec.config.host
        port = free_port(host, spec.config.port)
        command = server_command(
            spec.config, model=spec.model, device=spec.device, port=port, seed=spec.seed, name=spec.served_name
        )
        env = server_environment(spec.config, spec.device) | model_environment(spec.model)
        env |= {TOKEN_VARIABLE: spec.token, FROZEN_VARIABLE: "1" if spec.frozen else ""}
        self.supervisor.start(spec.process, command, env=env, log=spec.log)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def start_trainer(self, spec: TrainerSpec) -> None:
        command = [sys.executable, "-m", "prl.trainer", str(spec.run_dir.resolve())]
        if spec.num_processes > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.num_processes}"]
            command = [sys.executable, *torchrun, *command[1:]]
        env = model_environment(spec.model) | {"PRL_CONFIG": json.dumps(spec.payload)}
        self.supervisor.start("trainer", command, env=env, log=spec.log).may_finish = True

    def ensure_alive(self) -> None:
        self.supervisor.ensure_alive()

    async def watch(self) -> None:
        await self.supervisor.watch()

    async def finish(self, timeout_s: float) -> None:
        await self.supervisor.finish(timeout_s)

    def stop(self) -> None:
        self.supervisor.stop()


def resolve_model(config: ModelConfig, device: str) -> ModelConfig:
    """The model node with what depends on this machine filled in: an absolute path, the engine's number format."""
    folder = Path(config.path).expanduser()
    path = str(folder.resolve()) if folder.is_dir() else config.path
    dtype = config.dtype if config.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    return replace(config, path=path, dtype=dtype)


def model_environment(model: ModelConfig) -> dict[str, str]:
    """Environment variables of every process that loads the model."""
    env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if Path(model.path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"  # a local folder needs nothing from the hub, and asking takes its time-outs
    return env
