"""Serve what a run has trained, or any model, behind OpenAI's API.

    prl serve <run | checkpoint | model> [key=value …]
    prl serve policy=true model=tiny [key=value …]     an engine for runs
    prl serve api=tinker model=tiny [key=value …]      for clients of Tinker

A target is a run or a checkpoint of one, with the settings of its model, a
model folder, or a model of prl or of the hub. It prints its address, its key
and how to ask it, and serves until Ctrl-C.

options:
  name=…                        the model's name in requests
  tools=false                   true: replies have tool calls
  policy=false                  true: an engine that runs train with, in turn
  engine.port=8001              the TCP port
  engine.host=127.0.0.1         the address; another one opens it to the network
  engine.device=auto            cpu or cuda
  engine.max_num_seqs=256       replies at once
  engine.gpu_memory_utilization=0.5   the share of a GPU's memory
  model.max_model_len=…         prompt and reply together, in tokens
  model.dtype=auto              number format of the weights

examples:
  prl serve outputs/hello
  prl serve outputs/hello/checkpoints/step_000020 engine.port=8002 name=mine
  prl serve Qwen/Qwen3-0.6B tools=true
  PRL_TOKEN=my-key prl serve tiny-teacher       a key that stays the same

"""

import os
import re
import secrets
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig

from prl.base.errors import ConfigError
from prl.base.text import safe
from prl.config.build import class_of
from prl.config.compose import CONF, options, to_config
from prl.config.hardware import Machine
from prl.config.model_reference import FrozenModelConfig
from prl.config.run_yaml import quoted
from prl.config.schema import ModelConfig, ServeConfig
from prl.config.suggestions import override_key
from prl.config.validate import validate_server
from prl.engines.base import Engine
from prl.engines.protocol import TOKEN_VARIABLE
from prl.launch import command
from prl.launch.children import leave_none
from prl.launch.local import LocalLauncher
from prl.launch.plan import NO_NEED, POLICY_NAME, ModelPlan, model_plan, need_of, placed
from prl.launch.signals import run_to_end

KEY_VARIABLE = "PRL_TEACHER_KEY"  # not PRL_TOKEN: whoever may ask this model need not command a run's engine


TINKER = "api=tinker"
"""Argument that has another server started, with a config of its own."""


def with_target(arguments: list[str]) -> list[str]:
    """Arguments in which overrides stand for a run, a checkpoint, a model folder or a model's name.

    Raises ConfigError for one that is not there, for several, and beside a model that an override chooses.
    """
    from prl.tools.evaluation.arguments import is_target
    from prl.tools.evaluation.targets import model_of, served_name

    targets = [argument for place, argument in enumerate(arguments) if is_target(arguments, place)]
    if not targets:
        return arguments
    overrides = [argument for argument in arguments if argument not in targets]
    if len(targets) > 1:
        raise ConfigError(f"{' '.join(targets)}: this command serves one model: start it once for each")
    if any(override_key(override) in ("model", "model.path") for override in overrides):
        raise ConfigError(f"{targets[0]} is the model to serve: leave model=… out")
    model = {f"model.{key}": value for key, value in vars(model_of(targets[0])).items() if value is not None}
    named = {"name": served_name(targets[0])} | model
    return ["model=hf", *(f"{key}={quoted(v) if isinstance(v, str) else v}" for key, v in named.items()), *overrides]


def main(config: ServeConfig) -> None:
    """Serve until stopped. Raises ConfigError before anything has started, PrlError when the server ends by itself."""
    machine = Machine()
    engine = config.engine
    if config.tools:
        engine = class_of(engine, Engine, "engine").with_tools(engine, family_of(config.model))
    validate_server(config.model, engine, machine)
    if engine.urls:
        raise ConfigError("engine.urls names servers that already run; nothing is left to serve")
    if engine.servers > 1:
        raise ConfigError(f"engine.servers={engine.servers}: this command serves one: start it once for each")
    from prl.launch.checks import check_loadable  # transformers, once the config has passed

    plan = model_plan(
        engine,
        config.model,
        placed([need_of(engine, "engine", machine), NO_NEED, NO_NEED], machine, elsewhere=False).engines,
        machine,
        process=config.name,
        served_name=POLICY_NAME if config.policy else config.name,
        token=os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(24),
        log=Path(config.log),
        sharing=2 if config.policy else 3,  # it, and the trainer and the engine of the run that asks it
        frozen=not config.policy,
    )
    check_loadable(config.model, plan, "model.", trained=False)
    run_to_end(serve(plan, lambda url: how_to_use(config, url, plan.spec.token)))


def family_of(model: ModelConfig) -> str | None:
    """Return the renderer that a model's family has; None where neither the config nor the model's name says it."""
    from renderers.base import MODEL_RENDERER_MAP  # takes seconds

    return model.renderer or MODEL_RENDERER_MAP.get(model.path)


async def serve(plan: ModelPlan, how_to_use: Callable[[str], str]) -> None:
    """Start the server, print where it is, and watch it."""
    from prl.engines.frozen import FrozenPool  # its HTTP client is imported once the config has passed

    spec = plan.spec
    with LocalLauncher() as launcher:
        [url] = plan.start(launcher.start_engine)
        print(f"starting {spec.process} from {spec.model.path}; log: {spec.log}", file=sys.stderr, flush=True)
        pool = FrozenPool(FrozenModelConfig(spec.served_name, f"{url}/v1"), spec.token)
        try:
            await pool.wait_ready(spec.config.startup_timeout_s, launcher.ensure_alive)
        finally:
            await pool.close()
        print(f"{safe(how_to_use(url))}\n\nCtrl-C ends it.", file=sys.stderr, flush=True)
        await launcher.watch()


def how_to_use(config: ServeConfig, url: str, token: str) -> str:
    """Return how a run uses what is served at `url`; its `token` is shown unless the environment has it."""
    shown = f"${TOKEN_VARIABLE}" if os.environ.get(TOKEN_VARIABLE) else token
    name = config.name if re.fullmatch(r"[\w.-]+", config.name) else quoted(config.name)
    if config.policy:
        key = "" if shown != token else f"  export {TOKEN_VARIABLE}={token}\n"
        model = (
            [f"model={name}"] if name in options()["model"] else ["model=hf", f"model.path={quoted(config.model.path)}"]
        )
        return (
            f"an engine for {config.name} is at {url}. Train with it in another terminal, one run at a time:\n\n{key}"
            f"  python -m prl.train {shlex.join(model)} engine.urls=[{url}]"
        )
    teacher = shlex.join(["algo=opd", "teacher=endpoint", f"teacher.name={name}"])
    return (
        f"{config.name} is served at {url}/v1. In another terminal OpenAI's clients find it by\n\n"
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={shown}\n\n"
        f"under the name {config.name}{'' if config.tools else ', without tool calls (tools=true has them)'}. "
        "Examples: prl/SERVING.md. Or distil from it:\n\n"
        f"  export {KEY_VARIABLE}={shown}\n"
        f"  python -m prl.train {teacher} teacher.base_url={url}/v1 teacher.api_key_var={KEY_VARIABLE}"
    )


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="serve")
def _job(cfg: DictConfig) -> None:
    with command.errors_as_exit_codes():
        main(to_config(ServeConfig, cfg, []))


if __name__ == "__main__":
    leave_none()
    with command.errors_as_exit_codes():
        arguments = with_target([argument for argument in sys.argv[1:] if argument != TINKER])
    if TINKER in sys.argv[1:]:
        from prl.tinker.command import job

        command.run(job, arguments, "tinker")
    else:
        command.run(_job, arguments, "serve")
