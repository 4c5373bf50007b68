"""Every use of Hydra that goes beyond its public interface. Written for Hydra 1.3."""

from collections.abc import Iterator
from typing import Any, cast

import hydra._internal.hydra as hydra_main
from hydra._internal.callbacks import Callbacks
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from prl.config.instantiate import class_of
from prl.config.targets import entries
from prl.errors import ConfigError

PLUGINS = ("hydra.", "hydra_plugins.", "optuna.")
"""Beginnings of the paths of Hydra's launchers and sweepers, and of what these are given."""
LOGGING = "logging."
compose_for_mode = hydra_main.Hydra.get_mode


class CheckedCallbacks(Callbacks):
    """Hydra's callbacks, which it makes before anything else: here the node `hydra` is checked like all of a config."""

    def __init__(self, config: DictConfig | None = None):
        if config is not None:
            check(cast(dict[str, Any], OmegaConf.to_container(config.hydra, resolve=False)))
        super().__init__(config)


def install() -> None:
    """Have Hydra's own node checked before it makes anything of it, and a config composed once."""
    hydra_main.Callbacks = CheckedCallbacks  # type: ignore[misc]
    hydra_main.Hydra.get_mode = get_mode  # type: ignore[method-assign]


def get_mode(self: hydra_main.Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """`hydra.mode` of the config, for which Hydra composes it a first time; None, without, where nothing can set it.

    What prl ships sets none. Overrides may, and files of the user's, which `hydra.searchpath` or a flag adds.
    """
    found = [path.provider for path in self.config_loader.get_search_path().get_path()]
    if "command-line" in found or any("hydra" in override for override in overrides):
        return compose_for_mode(self, config_name, overrides)
    return None


def check(node: dict[str, Any]) -> None:
    """Say which packages of the user's the node `hydra` imports, and refuse what it may not name.

    Callbacks are subclasses of Hydra's `Callback` with plain values; launchers and sweepers are Hydra's plugins, which
    look that up themselves; a logging config makes handlers of Python's `logging` alone.

    Raises ConfigError.
    """
    parts = {key: node.get(key) or {} for key in ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")}
    for kind, part in parts.items():
        if not isinstance(part, dict):
            raise ConfigError(f"hydra.{kind}={part!r} is no node: write its keys there")
    for name, callback in parts["callbacks"].items():
        where = f"hydra.callbacks.{name}"
        class_of(callback, Callback, where)
        for key, target in targets(callback, where):
            if key != f"{where}._target_":
                raise ConfigError(f"{key}={target!r}: a callback takes plain values")
    for kind in ("launcher", "sweeper"):
        for key, target in targets(parts[kind], f"hydra.{kind}"):
            if not str(target).startswith(PLUGINS):
                raise ConfigError(f"{key}={target!r} is not one of Hydra's plugins")
    for kind in ("job_logging", "hydra_logging"):
        refuse_factories(parts[kind], f"hydra.{kind}")


def targets(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Every `_target_` in a node, in any depth, as it is written: an interpolation counts, too."""
    for key, value in entries(node):
        if key == "_target_":
            yield f"{where}.{key}", value
        yield from targets(value, f"{where}.{key}")


def refuse_factories(node: Any, where: str) -> None:
    """Raise ConfigError where a logging config names a class that is not of `logging`, or a function that makes one."""
    for key, value in entries(node):
        name = f"{where}.{key}"
        if key == "()" or (key in ("class", ".") and not str(value).startswith(LOGGING)):
            raise ConfigError(f"{name}={value!r}: of a logging config, only classes of logging may be named")
        refuse_factories(value, name)
