"""The run directory: refuse one that holds a run, write what a run begins and ends with."""

import logging
from pathlib import Path

import msgspec
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from prl.config.instantiate import plain
from prl.config.schema import TrainConfig
from prl.errors import ConfigError
from prl.wire.files import write_atomically


class RunResult(msgspec.Struct):
    """The content of `result.json`."""

    status: str = "failed"
    """completed, failed or stopped."""
    error: str | None = None
    ended_because: str | None = None
    """Why the run ended before `max_steps`; null where it did not."""
    steps: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = {}
    """The newest value of every metric."""

    def record(self, last: dict[str, float]) -> None:
        """Take over the newest metrics, `step` among them."""
        self.steps = int(last.get("step", 0))
        self.metrics = {key: value for key, value in last.items() if key != "step"}


def refuse_existing(run_dir: Path) -> None:
    """Raise ConfigError for a directory that holds a run."""
    if any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "result.json")):
        raise ConfigError(f"run.dir={str(run_dir)!r} already holds a run: choose another run.name, or remove it")


def new_run_dir(config: TrainConfig) -> Path:
    """Make the run directory and write the resolved config into it."""
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(plain(config)), run_dir / "config.yaml")
    if HydraConfig.initialized():
        save_hydra(run_dir / ".hydra")
    return run_dir


def save_hydra(folder: Path) -> None:
    """Write Hydra's own records, which Hydra would have written before the directory was checked."""
    folder.mkdir(exist_ok=True)
    hydra_config = HydraConfig.get()
    OmegaConf.save(hydra_config, folder / "hydra.yaml")
    OmegaConf.save(OmegaConf.create(list(hydra_config.overrides.task)), folder / "overrides.yaml")


def write_result(run_dir: Path, result: RunResult) -> None:
    """Write `result.json`."""
    write_atomically(run_dir / "result.json", msgspec.json.format(msgspec.json.encode(result)) + b"\n")


def log_to(path: Path) -> None:
    """Send this process's log to `path`, and its warnings to the terminal as well."""
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
