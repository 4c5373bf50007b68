"""Hydra composes in two thirds of the time, to the same: thousands of tests compose, and it repeats work for nothing.

Commands that tests start as processes compose with Hydra as it is. Written for the private parts of hydra-core 1.3.
"""

from hydra._internal import defaults_list
from hydra.core.config_store import ConfigStore


def _itself(store, memo):
    """A copy that is the store itself: each composition copies its sources, and them alone does it change."""
    return store


def _only_where_needed(create):
    """The choices so far, as a config, where an entry of the defaults list has an interpolation to resolve in them."""
    return lambda overrides, defaults, self_added: (
        create(overrides, defaults, self_added) if any(entry.is_interpolation() for entry in defaults) else None
    )


ConfigStore.__deepcopy__ = _itself
defaults_list._create_interpolation_map = _only_where_needed(defaults_list._create_interpolation_map)
