"""`config.yaml` of a run: its resolved config, which `--config-dir <run> --config-name config` composes again.

It names code by `_target_`, as a command line does. Nobody takes that up but the command that was given the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from prl.base.errors import ConfigError
from prl.base.masking import masked
from prl.base.text import in_one_line
from prl.config.build import plain
from prl.config.evaluation import EvaluationConfig
from prl.config.schema import TrainConfig

DEFAULTS = ["/base@_global_", "_self_"]
"""Files that Hydra composes it with: where a run lives and Hydra's own settings (conf/base.yaml)."""


def data_of(config: TrainConfig | EvaluationConfig) -> dict[str, Any]:
    """A config as files show it: plain data without secrets."""
    return cast(dict[str, Any], masked(plain(config)))


def text_of(config: TrainConfig | EvaluationConfig) -> str:
    """Return what `config.yaml` says of a config. A training run itself is its directory."""
    data = data_of(config)
    if isinstance(config, TrainConfig):
        # Composed again, it is another run: one with the old name and directory would be refused.
        data = {"defaults": DEFAULTS} | without_run(data)
    return OmegaConf.to_yaml(OmegaConf.create(data))


def yaml_of(text: str) -> Any:
    """The config that a text of `config.yaml` says, with interpolations as they are."""
    content = OmegaConf.to_container(OmegaConf.create(text))  # 4e-4 is a number, as for Hydra
    return {key: value for key, value in content.items() if key != "defaults"} if isinstance(content, dict) else content


def load(path: Path) -> dict[str, Any]:
    """The config in a run's `config.yaml`. Raises ConfigError where that is none."""
    try:
        content = yaml_of(path.read_text(encoding="utf-8"))
    except Exception as error:  # YAML's and OmegaConf's errors have no common base
        raise ConfigError(f"{path} cannot be read: {in_one_line(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("envs"), dict):
        raise ConfigError(f"{path} is not the config of a run")
    return without_run(content)


def has_config(run_dir: Path) -> bool:
    """Return whether a run has got as far as its config: a start that died may have left an empty one, or none."""
    path = run_dir / "config.yaml"
    return path.exists() and path.stat().st_size > 0


def without_run(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the name and the directory of its run."""
    return {key: value for key, value in config.items() if key != "run"}


def quoted(value: object) -> str:
    """A text in the grammar of Hydra's overrides."""
    return str(QuotedString(str(value), Quote.single).with_quotes())


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as dotted key -> value. Lists are values, and so are empty mappings."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values
