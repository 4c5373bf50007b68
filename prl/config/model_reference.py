"""Model references: `"policy"`, the model being trained, or a frozen model behind an OpenAI-compatible endpoint.

A reference is declared on the component that uses it. Its role there (a teacher, a judge) is that component's own word;
the rest of prl asks only whether a model is live (the policy) or frozen.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any
from urllib.parse import urlsplit

from prl.base.errors import ConfigError

POLICY = "policy"
DEMONSTRATIONS = "demonstrations"
"""A source of rollouts: the tasks' own."""


@dataclass
class FrozenModelConfig:
    """A model that is served and never updated.

    It must share the policy's tokenizer, since tokens are sent as ids; a source of rollouts, and a model that is
    compared by text (`algo.align`), may have any.
    """

    name: str = ""
    """The name it is served under."""
    base_url: str | list[str] | None = None
    """Its OpenAI-compatible endpoint, e.g. http://127.0.0.1:8001/v1, or a list of several that serve the same."""
    api_key_var: str | None = None
    """Environment variable that holds the endpoint's key; null = no key is sent."""
    timeout_s: float = 120.0
    """Deadline of its first answer, of the wait while it is unreachable, and of one request, seconds."""
    tokenizer: str | None = field(default=None, compare=False)
    """Its tokenizer, a folder or a name on the hub, for `algo.align=text`; null = its name."""

    @property
    def urls(self) -> list[str]:
        """The endpoints of `base_url`; empty without one."""
        several = [self.base_url] if isinstance(self.base_url, str) else self.base_url
        return list(several or [])


@dataclass
class SourceConfig:
    """The model that generates an algorithm's rollouts."""

    source: FrozenModelConfig | str = POLICY
    """`policy`, the model being trained, a frozen model {name, base_url}, or the tasks' `demonstrations`."""
    demo_key: str = "demonstration"
    """The task's field with the demonstration: a text, or a list of messages."""

    def __post_init__(self) -> None:
        self.source = as_reference(self.source)


KEYS = tuple(key.name for key in fields(FrozenModelConfig))


def as_reference(value: Any) -> Any:
    """The frozen model that a mapping describes. Other values are returned as they are, for `check_reference`."""
    return FrozenModelConfig(**value) if isinstance(value, Mapping) and set(value) <= set(KEYS) else value


def frozen_models(component: Any, where: str) -> Iterator[tuple[str, FrozenModelConfig]]:
    """The frozen models that an algorithm refers to, with their config keys.

    A field of a class of the user's own refers to one if it is a `FrozenModelConfig`, or a mapping of its keys with
    `base_url` among them, which `reference` and `teacher` may leave out.

    Args:
        component: The algorithm, its config node, or a mapping of its fields.
        where: Its config key.
    """
    # What is no component at all is refused where it is built.
    options = component if isinstance(component, Mapping) else getattr(component, "__dict__", {})
    for key, value in options.items():
        named = isinstance(value, Mapping) and ("base_url" in value or key in ("reference", "teacher"))
        reference = as_reference(value) if named else value
        if isinstance(reference, FrozenModelConfig):
            yield f"{where}.{key}", reference
        elif key in ("sampling", "kl") and (is_dataclass(value) or isinstance(value, Mapping)):
            yield from frozen_models(value, f"{where}.{key}")


def check_url(value: Any, where: str, example: str) -> None:
    """Raise ConfigError unless `value` is a URL that a request can be sent to, and has no password in it."""
    if isinstance(value, str) and re.match(r"\w+://[^/?#]*@", value):  # it would stand in every file of the run
        raise ConfigError(f"{where}: a URL has a user or a password in it: write it without, like {example}")
    if not is_url(value):
        raise ConfigError(f"{where}={value!r} is not a URL: write it like {example}")


def is_url(value: Any) -> bool:
    """Return whether `value` is a URL that a request can be sent to."""
    looks_right = isinstance(value, str) and re.fullmatch(r"https?://[^\s/]+(/\S*)?", value)
    try:
        return bool(looks_right and urlsplit(value).hostname and urlsplit(value).port != 0)
    except ValueError:  # a port that is not a number, or above 65535
        return False


def check_source(sampling: SourceConfig, where: str) -> None:
    """Raise ConfigError unless `sampling` names a source of rollouts, apart from its URL; `where` is its config key."""
    if sampling.source != DEMONSTRATIONS:
        check_reference(sampling.source, f"{where}.source", hosted=True)
        if sampling.demo_key != SourceConfig.demo_key:
            raise ConfigError(f"{where}.demo_key={sampling.demo_key}: only {where}.source=demonstrations reads it")
    elif not sampling.demo_key:
        raise ConfigError(f"{where}.demo_key is empty: name the task's field that holds its demonstration")


def check_reference(value: Any, where: str, *, hosted: bool = False) -> None:
    """Raise ConfigError unless `value` is a reference that can be used.

    Args:
        value: The policy's name or a `FrozenModelConfig`.
        where: Its config key, for messages.
        hosted: Whether the launcher serves the model and knows its address.
    """
    if value == POLICY:
        return
    if not isinstance(value, FrozenModelConfig):
        raise ConfigError(f"{where}={value!r} is not a model reference: write policy, or {{{', '.join(KEYS)}}}")
    if not (value.name and isinstance(value.name, str)):
        raise ConfigError(f"{where}.name={value.name!r}: give the name that the endpoint serves the model under")
    if not isinstance(value.timeout_s, int | float) or not 0 < value.timeout_s < float("inf"):
        raise ConfigError(f"{where}.timeout_s must be a number above 0, got {value.timeout_s!r}")
    if not isinstance(value.api_key_var, str | None):
        raise ConfigError(f"{where}.api_key_var must be the name of an environment variable, got {value.api_key_var!r}")
    if hosted:
        return
    if not value.urls:
        raise ConfigError(f"{where} is a frozen model without base_url: give it, or choose teacher=local")
    for url in value.urls:
        check_url(url, f"{where}.base_url", "http://127.0.0.1:8001/v1")
    if value.api_key_var is not None and not os.environ.get(value.api_key_var):
        raise ConfigError(f"{where}.api_key_var={value.api_key_var}: that environment variable is not set")
