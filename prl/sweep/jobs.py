"""The jobs that a sweep is going to have, from its config alone, and a dry run of them all (`-m … dry_run=true`)."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from prl.command import one_line
from prl.compose import job_config, typed
from prl.config.schema import TrainConfig
from prl.errors import ConfigError
from prl.sweep.naming import job_name


def overrides_of_jobs(config: DictConfig, decide: tuple[str, ...] = ("",)) -> Iterator[list[str]]:
    """The overrides of each job, once for those that differ in no key that begins like one of `decide`.

    Values that a search chooses are left out.
    """
    varied, fixed = [], []
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    for override in parser.parse_overrides(typed(config.hydra)):
        key = override.get_key_element()
        if not override.is_sweep_override():
            fixed.append(str(override.input_line))
        elif override.is_discrete_sweep() and key.lstrip("+").startswith(decide):
            varied.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    for chosen in product(*varied):
        yield [*fixed, *chosen]


def config_of_job(config: DictConfig, overrides: list[str]) -> TrainConfig:
    """The config of the job that has these overrides. Raises ConfigError, and what Hydra raises."""
    loader = GlobalHydra.instance().config_loader()
    found: TrainConfig = job_config(loader.load_sweep_config(config, overrides), overrides)
    return found


def dry_run_instead(config: DictConfig, folder: Path, varied: list[str]) -> None:
    """Do a dry run of each job of a sweep with `dry_run=true`, before Hydra makes a folder for any, and exit.

    Raises ConfigError for the first job that is refused, and where only some jobs would be dry.
    """
    if "dry_run" in varied:
        raise ConfigError("dry_run is for all jobs of a sweep or for none: give it one value")
    if not config.dry_run:
        return
    from prl.train import main  # whose module imports this one

    for overrides in overrides_of_jobs(config):
        name = job_name(overrides, list(config.hydra.job.config.override_dirname.exclude_keys))
        print(f"job {name}:", flush=True)
        try:
            found = config_of_job(config, overrides)
            # A job that is there already goes on, or has its folder moved.
            free = found.run.resume or not (folder / name).exists()
            found.run.dir = str(folder / name if free else folder / name / "again")
            main(found)
        except (ConfigError, HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"job {name}: {one_line(error)}") from error
    raise SystemExit(0)
