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
  engine=default                sample on servers, not in this process
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
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from prl.base.errors import ConfigError
from prl.base.text import safe
from prl.config.build import class_of
from prl.config.compose import CONF, to_config
from prl.config.gpus import Need
from prl.config.hardware import Machine
from prl.config.schema import TinkerConfig
from prl.config.validate import validate_server
from prl.engines.base import Adapters, Engine
from prl.launch import command
from prl.launch.local import LocalLauncher
from prl.launch.plan import NO_NEED, ModelPlan, TrainerSpec, model_plan, need_of, placed
from prl.launch.signals import run_to_end
from prl.launch.supervisor import Supervisor
from prl.orchestrator.who_waits import ENGINE, Waiting
from prl.runs.owner import owned

if TYPE_CHECKING:  # torch, which composing a config does without
    from prl.tinker.sampler import Snapshots

KEY_VARIABLE = "TINKER_API_KEY"
PREFIX = "tml-"
"""Beginning of a key that the SDK takes."""


def main(config: TinkerConfig) -> None:
    """Serve until stopped. Raises ConfigError before anything has started."""
    machine = Machine()
    plan, ranks = planned(config, machine)
    key = os.environ.get(KEY_VARIABLE) or PREFIX + secrets.token_hex(24)
    if not key.startswith(PREFIX):
        raise ConfigError(f"{KEY_VARIABLE}: clients take a key that begins with {PREFIX}")
    try:
        listening = socket.create_server((config.host, config.port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"host={config.host} port={config.port}: {error}") from error
    with listening, owned(Path(config.dir)):
        run_to_end(run(config, plan, ranks, key, listening))


def planned(config: TinkerConfig, machine: Machine) -> tuple[ModelPlan, TrainerSpec]:
    """Decide on the engine, and on the ranks of the trainer. Raises ConfigError for what they cannot be."""
    from prl.launch.checks import check_loadable  # transformers
    from prl.tinker.ranks import ranks_of  # torch

    node = config.engine
    validate_server(config.model, node, machine)
    engine = class_of(node, Engine, "engine")
    if not engine.largest_adapter:
        raise ConfigError(f"engine={engine.__name__}: api=tinker wants one that serves adapters: choose engine=default")
    if config.max_rank > engine.largest_adapter:
        raise ConfigError(f"max_rank={config.max_rank}: {engine.__name__} has {engine.largest_adapter} at most")
    if node.urls:
        raise ConfigError("engine.urls: api=tinker starts its engine itself: leave it out")
    machine.check_device(config.trainer.device, "trainer.device")
    ranks = config.trainer.num_processes
    on_gpus = machine.device_of(config.trainer.device) == "cuda"
    trainer = Need(ranks, int(on_gpus), f"trainer.num_processes={ranks}")
    placement = placed([need_of(node, "engine", machine), trainer, NO_NEED], machine, elsewhere=False)
    plan = model_plan(
        node,
        config.model,
        placement.engines,
        machine,
        process=ENGINE,
        served_name=config.name,
        token=secrets.token_hex(24),
        log=Path(config.dir) / "engine.log",
        sharing=ranks + max(1, node.servers),
    ).with_adapters(Adapters(config.models, config.max_rank))
    check_loadable(config.model, plan, "model.", trained=True)
    return plan, ranks_of(config.trainer, plan.spec.model, Path(config.dir), machine, placement.ranks)


async def run(config: TinkerConfig, plan: ModelPlan, ranks: TrainerSpec, key: str, listening: socket.socket) -> None:
    """Load the model twice, to train and to sample, and serve until cancelled.

    Raises ConfigError for a model that the trainer would get wrong, PrlError where an engine or a rank fails.
    """
    from prl.tinker.ranks import lead, start_others
    from prl.tinker.server import serve

    timeout_s = plan.spec.config.startup_timeout_s
    with LocalLauncher() as launcher:
        sampler = sampler_of(plan, launcher)
        try:
            start_others(ranks, launcher)
            await sampler.wait_ready(timeout_s, launcher.ensure_alive)
            learner = await asyncio.to_thread(lead, ranks, launcher)
        except ValueError as error:
            await sampler.close()
            raise ConfigError(f"model.path={ranks.model.path!r}: {error}") from error
        except BaseException:
            await sampler.close()
            raise
        supervisor = Supervisor(launcher, say, plan.restarts, timeout_s, sampler.pool)
        said = how_to_use(config, listening.getsockname()[:2], key)
        serving = serve(config, learner, sampler, key, listening, said)
        await supervisor.guard(serving, lambda: Waiting("", time.monotonic()))  # to wait for clients is no news


def say(message: str) -> None:
    """Show a line to the person at the terminal."""
    print(safe(message), file=sys.stderr, flush=True)


def sampler_of(plan: ModelPlan, launcher: LocalLauncher) -> "Snapshots":
    """Start the engine; returns what samples, before it is ready."""
    if not plan.is_server:
        from prl.tinker.in_process import SnapshotsInProcess

        return SnapshotsInProcess(plan.spec)
    from prl.engines.client import InferencePool
    from prl.tinker.on_servers import ServedSnapshots

    say(f"starting {plan.spec.process} from {plan.spec.model.path}; log: {plan.spec.log}")
    pool = plan.policy(launcher.start_engine)
    assert isinstance(pool, InferencePool)  # it is that of every server that serves adapters
    return ServedSnapshots(plan.spec, pool)


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
