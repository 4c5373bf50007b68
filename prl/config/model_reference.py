"""Model references: `"policy"`, the model being trained, or a frozen model behind an OpenAI-compatible endpoint.

A reference stands on the component that uses it. What a component calls it (a teacher, a judge) is that component's own
word: everything else asks only whether it is alive (the policy) or frozen.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from urllib.parse import urlsplit

from prl.errors import ConfigError

POLICY = "policy"


@dataclass
class FrozenModelConfig:
    """A model that somebody serves and nobody updates. It has to share the policy's tokenizer: tokens are sent as ids."""

    name: str = ""
    """The name it is served under."""
    base_url: Any = None
    """Its OpenAI-compatible endpoint, e.g. http://127.0.0.1:8001/v1, or a list of several that serve the same."""
    api_key_var: str | None = None
    """Environment variable that holds the endpoint's key; null = none is sent."""
    timeout_s: float = 120.0
    """Deadline for it to answer: at the start, when it has gone away, and for one scoring request. Seconds."""

    @property
    def urls(self) -> list[str]:
        if self.base_url is None:
            return []
        return list(self.base_url) if isinstance(self.base_url, list | tuple) else [self.base_url]


def as_reference(value: Any) -> Any:
    """The frozen model that a mapping describes; anything else as it came, for `check_reference` to judge."""
    if isinstance(value, Mapping) and set(value) <= {field.name for field in fields(FrozenModelConfig)}:
        return FrozenModelConfig(**value)
    return value


def frozen_models(node: Any, where: str) -> Iterator[tuple[str, FrozenModelConfig]]:
    """The frozen models that an algorithm's config refers to, with their config keys."""
    for key, value in (node if isinstance(node, Mapping) else vars(node)).items():
        if isinstance(value, FrozenModelConfig):
            yield f"{where}.{key}", value
        elif (key == "sampling" and is_dataclass(value)) or (key == "kwargs" and isinstance(value, Mapping)):
            yield from frozen_models(value, f"{where}.{key}")


def is_url(value: Any) -> bool:
    """Whether a request could be sent there."""
    if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
        return False
    try:
        parts = urlsplit(value)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or above 65535
        return False


def check_reference(value: Any, where: str, *, hosted: bool = False) -> None:
    """Raise ConfigError unless `value` is a reference that can be used; a `hosted` one gets its URL from the launcher."""
    if value == POLICY:
        return
    if not isinstance(value, FrozenModelConfig):
        keys = ", ".join(field.name for field in fields(FrozenModelConfig))
        raise ConfigError(
            f"{where}={value!r} is no model: write policy, or a frozen model with name and base_url (its keys: {keys})"
        )
    if not (value.name and isinstance(value.name, str)):
        raise ConfigError(f"{where}.name={value.name!r}: give the name that the endpoint serves the model under")
    if not isinstance(value.timeout_s, int | float) or not 0 < value.timeout_s < float("inf"):
        raise ConfigError(f"{where}.timeout_s must be a number above 0, got {value.timeout_s!r}")
    if not isinstance(value.api_key_var, str | None):
        raise ConfigError(f"{where}.api_key_var must be the name of an environment variable, got {value.api_key_var!r}")
    if hosted:
        return
    if not value.urls:
        raise ConfigError(
            f"{where} is a frozen model without base_url: give its endpoint, {where}.base_url=http://host:port/v1 "
            "(teacher=local has one hosted for the run)"
        )
    for url in value.urls:
        if not is_url(url):
            raise ConfigError(f"{where}.base_url={url!r} is no URL: write it like http://127.0.0.1:8001/v1")
    if value.api_key_var is not None and not os.environ.get(value.api_key_var):
        raise ConfigError(f"{where}.api_key_var={value.api_key_var}: that environment variable is not set")
