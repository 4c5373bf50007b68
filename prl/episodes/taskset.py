"""Find, configure and load verifiers tasksets; refuse what does not fit, naming the config key."""

import importlib
import itertools
from typing import Any, TypeVar

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.utils.generic import concrete_type

from prl.errors import ConfigError, of_own_code

T = TypeVar("T")

MAX_TASKS = 100_000
"""Tasks that are taken from a taskset that never ends."""


def load_taskset(taskset: str, args: dict[str, Any], where: str) -> vf.Taskset:
    """Load a taskset.

    Args:
        taskset: A dotted module path, or the id of an installed verifiers taskset.
        args: Its settings.
        where: Config key of `args`, for messages: `envs.math.args`.

    Raises:
        ConfigError: It cannot be found or imported, or does not accept the settings.
    """
    cls = find_taskset(taskset, where.rsplit(".", 1)[0])
    config_cls = concrete_type(cls, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
    try:
        return cls(config_cls.model_validate({"id": taskset, **args}))
    except ValidationError as error:
        problem = error.errors()[0]
        known = ", ".join(name for name in config_cls.model_fields if name not in vf.TasksetConfig.model_fields)
        key = ".".join([where, *map(str, problem["loc"])])
        raise ConfigError(f"{key}: {problem['msg']} (settings of {taskset}: {known or 'none'})") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # the constructor is user code
        raise ConfigError(f"{where}: {cls.__name__} failed: {of_own_code(error)}") from error


def find_taskset(taskset: str, where: str) -> type[vf.Taskset]:
    """Return the taskset class of a dotted module path or an installed id; `where` is the env's config key."""
    try:
        found = _exported(taskset, vf.Taskset)
    except ModuleNotFoundError as error:
        hint = "; is the package installed?" if "." in taskset else ""  # verifiers gives a hint of its own
        raise ConfigError(f"{where}.taskset={taskset!r}: {error}{hint}") from error
    except Exception as error:  # the module is user code
        raise ConfigError(f"{where}.taskset={taskset!r}: importing it failed: {of_own_code(error)}") from error
    if len(found) != 1:
        raise ConfigError(f"{where}.taskset={taskset!r} must export exactly one Taskset in __all__, has {len(found)}")
    return found[0]


def find_env(taskset: str) -> type[vf.Env] | None:
    """Return the env class that a taskset's module exports; None if its tasks are a prompt and an answer."""
    return next(iter(_exported(taskset, vf.Env)), None)


def _exported(taskset: str, base: type[T]) -> list[type[T]]:
    """Return the subclasses of `base` in `__all__` of a taskset's module."""
    module = importlib.import_module(taskset) if "." in taskset else vf.import_taskset(taskset)
    exports = [getattr(module, name) for name in getattr(module, "__all__", ())]
    return [cls for cls in exports if isinstance(cls, type) and issubclass(cls, base) and cls is not base]


def take_tasks(taskset: vf.Taskset, limit: int, where: str) -> list[vf.Task]:
    """Return the first `limit` tasks, at least one; `where` is the config key of the taskset's settings."""
    try:
        tasks = list(itertools.islice(iter(taskset), limit))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # `load` is user code
        raise ConfigError(f"{where}: loading the tasks failed: {of_own_code(error)}") from error
    if not tasks:
        raise ConfigError(f"{where}: taskset {taskset.config.id!r} has no task with these settings")
    return tasks
