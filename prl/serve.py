"""Serve a frozen model, for runs to distil from.

    python -m prl.serve model=tiny-teacher [key=value …]

Prints how a run refers to it, and serves until it is stopped. Its port is `inference.port` (8001); its key is PRL_TOKEN, a
fresh one where the environment gives none.
"""

import asyncio
import os
import secrets
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from prl.compose import CONF, to_config
from prl.config import suggestions
from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import ServeConfig
from prl.config.validate import check_server, resolve_device
from prl.errors import ConfigError, PrlError
from prl.train import until_signal

KEY_VARIABLE = "PRL_TEACHER_KEY"  # not PRL_TOKEN: whoever may ask this model need not command a run's engine


def main(config: ServeConfig) -> None:
    """Serve until stopped. Raises ConfigError before anything has started, PrlError when the server ends by itself."""
    check_server(config)
    if config.inference.urls:
        raise ConfigError("inference.urls names servers that already run; nothing is left to serve")
    try:
        asyncio.run(until_signal(serve(config)))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def serve(config: ServeConfig) -> None:
    """Start the server, say where it is, and watch it."""
    from prl.inference.auth import TOKEN_VARIABLE
    from prl.inference.frozen import FrozenPool
    from prl.launch.engine import resolve_model, start_engine
    from prl.launch.supervisor import Supervisor

    device = resolve_device(config.inference.device)
    given = os.environ.get(TOKEN_VARIABLE)
    token = os.environ[TOKEN_VARIABLE] = given or secrets.token_hex(24)
    with Supervisor() as processes:
        url, _ = start_engine(
            processes,
            config.inference,
            resolve_model(config.model, device),
            device=device,
            token=token,
            seed=0,
            log=Path(config.log),
            frozen=config.name,
        )
        print(f"starting {config.name} from {config.model.path}; log: {config.log}", file=sys.stderr, flush=True)
        pool = FrozenPool(FrozenModelConfig(config.name, f"{url}/v1", api_key_var=TOKEN_VARIABLE))
        try:
            await pool.wait_ready(config.inference.startup_timeout_s, processes.check)
        finally:
            await pool.close()
        print(f"{config.name} is served at {url}/v1. Distil from it in another terminal:\n", file=sys.stderr)
        print(
            f"  export {KEY_VARIABLE}={f'${TOKEN_VARIABLE}' if given else token}\n"
            f"  python -m prl.train algo=opd teacher=endpoint teacher.name={config.name} teacher.base_url={url}/v1 "
            f"teacher.api_key_var={KEY_VARIABLE}\n\nCtrl-C ends it.",
            file=sys.stderr,
            flush=True,
        )
        await processes.watch()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="serve")
def _job(cfg: DictConfig) -> None:
    suggestions.job_started()
    try:
        main(to_config(cfg))
    except PrlError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        raise SystemExit(130) from None


def cli() -> None:
    suggestions.run(_job, sys.argv[1:], CONF, "serve")


if __name__ == "__main__":
    cli()
