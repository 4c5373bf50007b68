"""Serve a frozen model, for runs to distil from, or an engine for runs to train with.

    python -m prl.serve model=tiny-teacher [key=value …]
    python -m prl.serve policy=true model=tiny [key=value …]    runs begin seconds sooner than with one of their own

Prints how a run refers to it, and serves until it is stopped. Its port is `engine.port` (8001); its key is
PRL_TOKEN, or a fresh one where the environment has none.
"""

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig

from prl.base.errors import ConfigError
from prl.config.compose import CONF, to_config
from prl.config.hardware import Machine
from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import ServeConfig
from prl.config.validate import validate_server
from prl.engines.protocol import TOKEN_VARIABLE
from prl.launch import command
from prl.launch.children import leave_none
from prl.launch.local import LocalLauncher
from prl.launch.plan import NO_NEED, POLICY_NAME, ModelPlan, model_plan, need_of, placed
from prl.launch.signals import run_to_end

KEY_VARIABLE = "PRL_TEACHER_KEY"  # not PRL_TOKEN: whoever may ask this model need not command a run's engine


def main(config: ServeConfig) -> None:
    """Serve until stopped. Raises ConfigError before anything has started, PrlError when the server ends by itself."""
    machine = Machine()
    validate_server(config.model, config.engine, machine)
    if config.engine.urls:
        raise ConfigError("engine.urls names servers that already run; nothing is left to serve")
    if config.engine.servers > 1:
        raise ConfigError(f"engine.servers={config.engine.servers}: this command serves one: start it once for each")
    from prl.launch.checks import check_loadable  # transformers, once the config has passed

    plan = model_plan(
        config.engine,
        config.model,
        placed([need_of(config.engine, "engine", machine), NO_NEED, NO_NEED], machine, elsewhere=False).engines,
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
        print(f"{how_to_use(url)}\n\nCtrl-C ends it.", file=sys.stderr, flush=True)
        await launcher.watch()


def how_to_use(config: ServeConfig, url: str, token: str) -> str:
    """Return how a run uses what is served at `url`; its `token` is shown unless the environment has it."""
    given = os.environ.get(TOKEN_VARIABLE)
    if config.policy:
        key = "" if given else f"  export {TOKEN_VARIABLE}={token}\n"
        return (
            f"an engine for {config.name} is at {url}. Train with it in another terminal, one run at a time:\n\n{key}"
            f"  python -m prl.train model={config.name} engine.urls=[{url}]"
        )
    return (
        f"{config.name} is served at {url}/v1. Distil from it in another terminal:\n\n"
        f"  export {KEY_VARIABLE}={f'${TOKEN_VARIABLE}' if given else token}\n"
        f"  python -m prl.train algo=opd teacher=endpoint teacher.name={config.name} teacher.base_url={url}/v1 "
        f"teacher.api_key_var={KEY_VARIABLE}"
    )


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="serve")
def _job(cfg: DictConfig) -> None:
    with command.errors_as_exit_codes():
        main(to_config(ServeConfig, cfg, []))


if __name__ == "__main__":
    leave_none()
    command.run(_job, sys.argv[1:], "serve")
