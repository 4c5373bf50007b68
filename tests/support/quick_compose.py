"""Hydra composes in a fifth of the time, to the same: thousands of tests compose, and it repeats work for nothing.

What is parsed, which files there are and what they make together is remembered for as long as no conf file and no
schema has changed; values are set in a copy of it. Commands that tests start as processes compose with Hydra as it is.
Written for the private parts of hydra-core 1.3 and omegaconf 2.3; `tests/config/test_quick_compose.py` composes without
it, too.
"""

import dataclasses
import functools
import os
import pickle
import warnings
from itertools import islice

import omegaconf.base
import omegaconf.grammar_parser
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import Overrides
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

MOST_FILES = 1000
"""A search path with more in it is looked through by Hydra alone."""

stored = 0
"""How often a schema was stored."""


def _itself(store, memo):
    """A copy that is the store itself: each composition copies its sources, and them alone does it change."""
    return store


def _only_where_needed(create):
    """The choices so far, as a config, where an entry of the defaults list has an interpolation to resolve in them."""
    return lambda overrides, defaults, self_added: (
        create(overrides, defaults, self_added) if any(entry.is_interpolation() for entry in defaults) else None
    )


def _in_place_of(function):
    """Have tracebacks show what is decorated as Hydra's, by the file: whatever else is in them is the user's."""

    def moved(other):
        other.__code__ = other.__code__.replace(co_filename=function.__code__.co_filename)
        return other

    return moved


def _counted(store):
    def counting(*args, **kwargs):
        global stored
        stored += 1
        return store(*args, **kwargs)

    return counting


def state_of(repo):
    """What the sources of configs hold now, for comparison; None where that takes too long to say."""
    found = [stored]
    for source in repo.get_sources():
        found.append((source.scheme(), source.path))
        if source.scheme() == "file":
            files = list(islice(_files(source.path), MOST_FILES + 1))
            if len(files) > MOST_FILES:
                return None
            found += files
        elif (source.scheme(), source.path) not in (("pkg", "hydra.conf"), ("structured", "")):
            return None
    return tuple(found)


def _files(folder):
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        if entry.is_dir():
            yield entry.path
            yield from _files(entry.path)
        elif entry.is_file():
            yield entry.path, *_version(entry.stat())


def _version(stat):
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@_in_place_of(ConfigLoaderImpl.load_configuration)
def _quiet(call, remember):
    """What `call()` returns; passed to `remember` too where nothing was to be warned of on the way."""
    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("always")
        found = call()
    for each in printed:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if not printed:
        remember(found)
    return found


class _Frozen:
    """A config, of which `copy()` is made in half the time of a deep copy."""

    def __init__(self, config):
        self.data = pickle.dumps(config, -1)

    def copy(self):
        return pickle.loads(self.data)


def _remembered_list(create):
    """The defaults list, which overrides of groups decide, with the overrides of values as they are this time."""
    known = {}

    @_in_place_of(create)
    def remembering(repo, config_name, overrides_list, **how):
        parsed = Overrides(repo=repo, overrides_list=overrides_list)
        values = {id(each) for each in parsed.config_overrides}
        groups = tuple(each.input_line for each in overrides_list if id(each) not in values)
        key = (state_of(repo), config_name, groups, tuple(how.items()))
        if key in known:
            return dataclasses.replace(known[key], config_overrides=parsed.config_overrides)
        call = functools.partial(create, repo=repo, config_name=config_name, overrides_list=overrides_list, **how)
        return _quiet(call, functools.partial(known.__setitem__, key) if key[0] else lambda _: None)

    return remembering


def _remembered_config(compose):
    """What the configs of a defaults list make together."""
    known = {}

    @_in_place_of(compose)
    def remembering(loader, defaults, repo):
        key = (state_of(repo), *(dataclasses.astuple(default) for default in defaults))
        if key in known:
            return known[key].copy()
        call = functools.partial(compose, loader, defaults=defaults, repo=repo)
        return _quiet(call, lambda config: known.update({key: _Frozen(config)}) if key[0] else None)

    return remembering


def _remembered_file(load):
    known = {}

    @_in_place_of(load)
    def remembering(source, config_path):
        path = os.path.join(source.path, source._normalize_file_name(config_path))
        if not os.path.exists(path):
            return load(source, config_path)
        key = (source.provider, source.path, config_path, *_version(os.stat(path)))
        if key not in known:
            known[key] = _Frozen(load(source, config_path))
        return known[key].copy()

    return remembering


ConfigStore.__deepcopy__ = _itself
ConfigStore.store = _counted(ConfigStore.store)
defaults_list._create_interpolation_map = _only_where_needed(defaults_list._create_interpolation_map)
config_loader_impl.create_defaults_list = _remembered_list(config_loader_impl.create_defaults_list)
ConfigLoaderImpl._compose_config_from_defaults_list = _remembered_config(
    ConfigLoaderImpl._compose_config_from_defaults_list
)
Plugins.instance()  # registers them
FileConfigSource = SourcesRegistry.instance().resolve("file")
FileConfigSource.load_config = _remembered_file(FileConfigSource.load_config)
omegaconf.base.parse = functools.lru_cache(maxsize=None)(omegaconf.grammar_parser.parse)
