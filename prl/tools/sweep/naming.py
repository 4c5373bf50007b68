"""Names of a sweep and its jobs: names that depend on the overrides alone, so that a command finds its jobs."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from prl.config.compose import typed
from prl.runs.run_dir import NOT_OF_A_RUN

MAX_NAME_BYTES = 100
"""A file name may have 255; monitors add their own parts to it."""
CARRIER = "hydra.job.config.override_dirname.exclude_keys"
"""Hydra's list of overrides that name no job. It reaches every job, in whatever process that runs."""

LAUNCHERS = {"joblib", "ray", "slurm"}
"""Options of the group `sweep` that change no result either."""


@dataclass(frozen=True)
class Arguments:
    """The overrides of a sweep's command, apart: those that vary between its jobs, and those that do not."""

    varied: tuple[str, ...]
    """Config keys, sorted."""
    fixed: dict[str, str]
    """Values by config key, of those that results depend on."""
    keys: tuple[str, ...]
    """Config keys of everything that does not vary."""


def key_of(override: str) -> str:
    """The config key of `[+]key=value`."""
    return override.split("=", 1)[0].lstrip("+")


def apart(overrides: list[str], known: tuple[str, ...] = ()) -> Arguments:
    """Take the overrides of a command apart; keys that are `known` to vary do so with one value as well."""
    parsed: list[Override] = OverridesParser.create().parse_overrides(overrides)
    values = {override.get_key_element().lstrip("+"): override for override in parsed}
    varied = {key for key, override in values.items() if override.is_sweep_override() or key in known}
    fixed = {key: override for key, override in values.items() if key not in varied}
    # A sweep is found again, and goes on, with other settings that change no result.
    recorded = {
        key: override.get_value_element_as_str()
        for key, override in sorted(fixed.items())
        if not key.startswith(NOT_OF_A_RUN)
    }
    if searched := set(re.findall(r"\w+", recorded.pop("sweep", ""))) - LAUNCHERS:
        recorded["sweep"] = ",".join(sorted(searched))
    return Arguments(varied=tuple(sorted(varied)), fixed=recorded, keys=tuple(fixed))


def overrides_of(hydra: DictConfig) -> list[str]:
    """The overrides of a sweep: an experiment's (`hydra.sweeper.params`), then those that were typed, which win."""
    params = hydra.sweeper.get("params") or {}
    return [*(f"{key}={value}" for key, value in params.items()), *typed(hydra)]


def folder_of(config: DictConfig) -> Path:
    """The directory of a sweep: the one that is given; else `outputs/<run.name>`; else named after the overrides.

    A `run.name` that depends on a job's config is not one for all: then it is the overrides' as well.
    """
    run: Any = OmegaConf.to_container(config.run, resolve=False)
    sweep: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    # What depends on a job's config is no place for all of them.
    for folder in (sweep["dir"], run["dir"], f"outputs/{run['name']}"):
        if "${" not in folder:
            return Path(folder)
    arguments = apart(overrides_of(config.hydra))
    name = "-".join([arguments.fixed.get("sweep", "sweep"), *(key.rsplit(".", 1)[-1] for key in arguments.varied)])
    return Path("outputs") / f"{short(name, 60)}-{digest(repr((arguments.varied, arguments.fixed)))}"


def subdir(*, _root_: Any) -> str:
    """The folder of a job within its sweep: the resolver `prl.job_name`."""
    hydra = _root_.get("hydra") or HydraConfig.get()
    return job_name(list(hydra.overrides.task), list(hydra.job.config.override_dirname.exclude_keys))


def job_name(overrides: list[str], excluded: list[str]) -> str:
    """The folder of a job: what varies, sorted; with a digest where the name had to be changed or cut."""
    named = sorted(override.lstrip("+") for override in overrides if key_of(override) not in excluded)
    return short(",".join(named) or "job", MAX_NAME_BYTES)


def short(name: str, limit: int) -> str:
    """`name` as the name of one folder, at most `limit` bytes long; a digest keeps those apart that were changed."""
    safe = "".join(c if c.isalnum() or c in "._=,-" else "_" for c in name)
    if safe == name and len(name.encode()) <= limit:
        return name
    return f"{safe.encode()[: limit - 9].decode(errors='ignore')}-{digest(name)}"


def digest(text: str) -> str:
    """Eight hexadecimal digits that stand for `text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


OmegaConf.register_new_resolver("prl.job_name", subdir, replace=True)
