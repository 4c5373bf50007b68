"""Find, configure and load verifiers tasksets; refuse what does not fit, naming the config key."""

import importlib
import itertools
from types import ModuleType
from typing import Any, TypeVar

from pydantic import ValidationError
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.env import Env
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.task import Task
from verifiers.v1.taskset import Taskset
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class, taskset_class

from prl.errors import ConfigError, of_own_code

T = TypeVar("T")

MAX_TASKS = 100_000
"""Tasks that are taken from a taskset that never ends."""


def load_taskset(taskset: str, args: dict[str, Any], where: str) -> Taskset:
    """Load a taskset.

    Args:
        taskset: A dotted module path, or the id of an installed verifiers taskset.
        args: Its settings.
        where: Config key of `args`, for messages: `envs.math.args`.

    Raises:
        ConfigError: It cannot be found or imported, or does not accept the settings.
    """
    cls = find_taskset(taskset, where.rsplit(".", 1)[0])
    config_cls = concrete_type(cls, TasksetConfig, origin=Taskset) or TasksetConfig
    try:
        config = config_cls.model_validate({"id": taskset, **args})
        return cls(config)
    except ValidationError as error:
        problem = error.errors()[0]
        known = ", ".join(name for name in config_cls.model_fields if name not in TasksetConfig.model_fields)
        key = ".".join([where, *map(str, problem["loc"])])
        raise ConfigError(f"{key}: {problem['msg']} (settings of {taskset}: {known or 'none'})") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # the constructor is user code
        raise ConfigError(f"{where}: {cls.__name__} failed: {of_own_code(error)}") from error


def find_taskset(taskset: str, where: str) -> type[Taskset]:
    """Return the taskset class of a dotted module path or an installed id; `where` is the env's config key."""
    if "." not in taskset:
        try:
            return taskset_class(taskset)
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}.taskset={taskset!r}: {error}") from error
        except Exception as error:  # the module is user code
            raise ConfigError(f"{where}.taskset={taskset!r}: importing it failed: {of_own_code(error)}") from error
    try:
        found = _exported(importlib.import_module(taskset), Taskset)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{where}.taskset={taskset!r}: {error}; is the package installed?") from error
    except Exception as error:
        raise ConfigError(f"{where}.taskset={taskset!r}: importing it failed: {of_own_code(error)}") from error
    if len(found) != 1:
        raise ConfigError(f"{where}.taskset={taskset!r} must export exactly one Taskset in __all__, has {len(found)}")
    return found[0]


def find_env(taskset: str) -> type[Env] | None:
    """Return the env class that a taskset's module exports; None if its tasks are a prompt and an answer."""
    if "." not in taskset:
        cls = environment_class(taskset)
        return None if cls is SingleAgentEnv else cls
    return next(iter(_exported(importlib.import_module(taskset), Env)), None)


def _exported(module: ModuleType, base: type[T]) -> list[type[T]]:
    """Return the subclasses of `base` in the module's `__all__`."""
    exports = [getattr(module, name) for name in getattr(module, "__all__", ())]
    return [cls for cls in exports if isinstance(cls, type) and issubclass(cls, base) and cls is not base]


def take_tasks(taskset: Taskset, limit: int, where: str) -> list[Task]:
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
