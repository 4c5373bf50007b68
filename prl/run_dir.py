"""The run directory: refuse one that holds a run, write what a run begins and ends with."""

import logging
from pathlib import Path
from typing import Any

import msgspec
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from prl.config.schema import TrainConfig
from prl.errors import ConfigError
from prl.wire.files import write_atomically


def refuse_existing(run_dir: Path) -> None:
    """Raise ConfigError for a directory that holds a run."""
    if any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "result.json")):
        raise ConfigError(f"run.dir={str(run_dir)!r} already holds a run: choose another run.name, or remove it")


def new_run_dir(config: TrainConfig) -> Path:
    """Make the run directory and write the resolved config into it."""
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(config), run_dir / "config.yaml")
    if HydraConfig.initialized():
        save_hydra(run_dir / ".hydra")
    return run_dir


def save_hydra(folder: Path) -> None:
    """What Hydra would have written, had it been let before the directory was checked."""
    folder.mkdir(exist_ok=True)
    hydra_config = HydraConfig.get()
    OmegaConf.save(hydra_config, folder / "hydra.yaml")
    OmegaConf.save(OmegaConf.create(list(hydra_config.overrides.task)), folder / "overrides.yaml")


def write_result(run_dir: Path, result: dict[str, Any]) -> None:
    write_atomically(run_dir / "result.json", msgspec.json.format(msgspec.json.encode(result)) + b"\n")


def log_to(path: Path) -> None:
    """Logging of this process to `path`; warnings to the terminal as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_terminal = logging.StreamHandler()
    to_terminal.setLevel(logging.WARNING)
    to_terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)
    logging.captureWarnings(True)
    for noisy in ("httpx", "aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
