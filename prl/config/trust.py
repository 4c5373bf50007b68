"""What a run directory, which may come from a stranger, is not followed in without trust."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prl.config.suggestions import override_key
from prl.config.targets import entries, names_code
from prl.errors import ConfigError
from prl.user_code import OWN

ASKS_TRUST = ("trust_remote_code", "api_key_var", "urls")
"""Keys whose values run code or send a secret."""


def refuse_foreign(path: Path, needs: Iterable[str], typed: frozenset[str]) -> None:
    """Raise ConfigError where there is anything that needs `--trust` and is not `typed` anew."""
    if listed := "\n".join(f"  {each}" for each in needs if each.split("=")[0] not in typed):
        raise ConfigError(f"{path} names what is not prl's own:\n{listed}\nadd --trust if you trust who made it")


def refuse_hydras(path: Path, overrides: Iterable[str]) -> None:
    """Raise ConfigError for an override of Hydra's own node or an argument: no run has recorded one as its override.

    Whatever it says would be done before the config is looked at.
    """
    for override in overrides:
        nodes = re.split("[@:]", override_key(override).strip())
        if override.startswith("-") or any(re.match(r"hydra\b|_global_|_group_", node) for node in nodes):
            raise ConfigError(f"{path}: {override[:120]!r} is no override of a run: remove it there")


def foreign(node: Any, where: str = "") -> Iterator[str]:
    """The keys of a config that name somebody's code, a secret, or a server that would get one, with their values."""
    for key, value in entries(node):
        name = f"{where}.{key}".lstrip(".")
        code = names_code(key, value) and not value.startswith(OWN)
        reads = isinstance(value, str) and "${" in value  # the environment, say
        if code or reads or (value and (key in ASKS_TRUST or name.endswith("inference.args"))):
            yield f"{name}={value}"
        else:
            yield from foreign(value, name)
