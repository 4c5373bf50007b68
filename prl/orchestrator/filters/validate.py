"""Build and validate the filters of one slot."""

from collections.abc import Mapping
from typing import Any

from prl.config.instantiate import build
from prl.errors import ConfigError
from prl.orchestrator.filters.base import Filter


def build_filters(nodes: Mapping[str, Any], where: str) -> dict[str, Filter]:
    """The filters that a slot's config nodes describe, by name, checked.

    Raises ConfigError for a node that is null, whatever `build` refuses, and a type that stands twice in the slot.
    """
    filters = {}
    for name, node in nodes.items():
        if node is None:
            raise ConfigError(f"{where}.{name}=null: to leave the filter out write '~{where}.{name}'")
        filters[str(name)] = build(node, Filter, f"{where}.{name}")
    validate_filters(filters, where)
    return filters


def validate_filters(filters: Mapping[str, Filter], where: str) -> None:
    """Raise ConfigError where one type of filter stands twice in a slot, `where` being the slot's config key."""
    found: dict[type, str] = {}
    for name, filter in filters.items():
        kind = type(filter)
        if (same := found.setdefault(kind, name)) != name:
            raise ConfigError(
                f"{where}.{name} and {where}.{same} are both {kind.__module__}.{kind.__qualname__}: a filter type may "
                "stand only once in a slot"
            )
