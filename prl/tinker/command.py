"""Serve the Tinker protocol over a model: the loop belongs to the client.

    prl serve api=tinker model=tiny [key=value …]
    prl serve api=tinker <run | checkpoint | model> [key=value …]

It prints its address and its key, and serves until Ctrl-C. A server that is
started again with the same dir goes on where it was.

options:
  name=…                        the model's name, base_model of clients
  dir=outputs/tinker-…          sessions, models, checkpoints
  port=8010                     the TCP port; 0 = a free one
  host=127.0.0.1                the address; another one opens it to the network
  models=8                      models of clients in memory
  max_rank=128                  largest rank of an adapter
  trainer.device=auto           where models are trained, cpu or cuda
  trainer.num_processes=1       ranks that train them together
  engine.device=auto            where they are sampled from
  model.max_model_len=…         prompt and reply together, in tokens

examples:
  prl serve api=tinker model=tiny
  TINKER_API_KEY=tml-mine prl serve api=tinker outputs/hello   a key that stays

"""

import asyncio
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from prl.base.errors import ConfigError
from prl.base.text import safe
from prl.config.build import class_of
from prl.config.compose import CONF, to_config
from prl.config.gpus import Gpus, Need
from prl.config.hardware import Machine
from prl.config.schema import TinkerConfig
from prl.config.validate import validate_server
from prl.engines.base import Engine, EngineSpec
from prl.launch import command
from prl.launch.local import LocalLauncher
from prl.launch.plan import NO_NEED, placed, resolved
from prl.launch.signals import run_to_end
from prl.launch.supervisor import Supervisor
from prl.orchestrator.who_waits import Waiting
from prl.runs.owner import owned

KEY_VARIABLE = "TINKER_API_KEY"
PREFIX = "tml-"
"""Beginning of a key that the SDK takes."""


def main(config: TinkerConfig) -> None:
    """Serve until stopped. Raises ConfigError before anything has started."""
    machine = Machine()
    engine = class_of(config.engine, Engine, "engine")
    validate_server(config.model, config.engine, machine)
    machine.check_device(config.trainer.device, "trainer.device")
    if not config.engine.in_process:
        raise ConfigError(f"engine={engine.__name__}: api=tinker samples with engine=transformers alone")
    key = os.environ.get(KEY_VARIABLE) or PREFIX + secrets.token_hex(24)
    if not key.startswith(PREFIX):
        raise ConfigError(f"{KEY_VARIABLE}: clients take a key that begins with {PREFIX}")
    try:
        listening = socket.create_server((config.host, config.port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"host={config.host} port={config.port}: {error}") from error
    device = machine.device_of(config.engine.device)
    spec = EngineSpec(
        process="engine",
        served_name=config.name,
        model=resolved(config.model, device),
        config=config.engine,
        device=device,
        seed=0,
        token="",
        log=Path(os.devnull),
        threads=config.engine.threads or 1,
    )
    ranks = config.trainer.num_processes
    trainer = Need(ranks, int(machine.device_of(config.trainer.device) == "cuda"), f"trainer.num_processes={ranks}")
    gpus = placed([NO_NEED, trainer, NO_NEED], machine, elsewhere=False).ranks
    with listening, owned(Path(config.dir)):
        run_to_end(run(config, spec, gpus, key, listening))


async def run(config: TinkerConfig, spec: EngineSpec, gpus: Sequence[Gpus], key: str, listening: socket.socket) -> None:
    """Load the model twice, to train and to sample, and serve until cancelled.

    Raises ConfigError for a model that cannot be loaded, or that the trainer would get wrong.
    """
    from prl.tinker.ranks import lead
    from prl.tinker.sampler import Snapshots
    from prl.tinker.server import serve

    with LocalLauncher() as launcher:
        try:
            learner = await asyncio.to_thread(lead, config.trainer, spec.model, Path(config.dir), launcher, gpus)
        except ValueError as error:
            raise ConfigError(f"model.path={spec.model.path!r}: {error}") from error
        said = how_to_use(config, listening.getsockname()[:2], key)
        serving = serve(config, learner, Snapshots(spec), key, listening, said)
        supervisor = Supervisor(launcher, lambda message: print(safe(message), file=sys.stderr, flush=True))
        await supervisor.guard(serving, lambda: Waiting("", time.monotonic()))  # to wait for clients is no news


def how_to_use(config: TinkerConfig, address: tuple[str, int], key: str) -> str:
    """Return how clients use the server; its key is shown unless the environment has it."""
    shown = "" if os.environ.get(KEY_VARIABLE) else f" {KEY_VARIABLE}={key}"
    return (
        f"{config.name} is served in {config.dir}. In another terminal:\n\n"
        f"  export TINKER_BASE_URL=http://{address[0]}:{address[1]}{shown} TINKER_TELEMETRY=0\n\n"
        f'and there tinker.ServiceClient().create_lora_training_client(base_model="{config.name}").\n\nCtrl-C ends it.'
    )


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="tinker")
def job(cfg: DictConfig) -> None:
    """Serve with a composed config."""
    with command.errors_as_exit_codes():
        main(to_config(TinkerConfig, cfg, []))
