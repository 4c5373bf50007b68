"""Build an object from the dotted path in its config's `_target_`."""

import functools
import importlib
import inspect
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from typing import Any

from prl.errors import ConfigError, PrlError, of_own_code


@dataclass
class FunctionConfig:
    """A function of the user's own."""

    _target_: str | None = None
    """Its dotted path; null = none."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments."""


# Modules of the interpreter that turn strings into actions: never a component of a run.
FORBIDDEN = {"builtins", "os", "posix", "subprocess", "sys", "shutil", "importlib", "runpy", "pickle", "ctypes", "pty"}


def with_nodes(value: Any) -> Any:
    """`value` with each mapping that has a `_target_` as an object: one that no schema describes is read like any other.

    Dataclasses are changed in place. A mapping inside such a node stays one.
    """
    if is_dataclass(value):
        for entry in fields(value):
            setattr(value, entry.name, with_nodes(getattr(value, entry.name)))
        return value
    if not isinstance(value, dict):
        return value
    if "_target_" in value and all(map(str.isidentifier, value)):
        return _node_class(tuple(value))(**value)
    return {key: with_nodes(item) for key, item in value.items()}


@functools.cache
def _node_class(names: tuple[str, ...]) -> type:
    return make_dataclass("Node", [(name, Any) for name in names])


def locate(target: str, where: str) -> Any:
    """The class or function that the dotted path `target` names; `where` is the config key, for messages."""
    module_path, _, name = target.rpartition(".")
    if not all(target.split(".")) or not module_path or module_path.split(".")[0] in FORBIDDEN:
        raise ConfigError(
            f"{where}._target_={target!r}: give the dotted path of a class or function, e.g. my_pkg.Thing"
        )
    try:
        module = importlib.import_module(module_path)
    except ImportError as error:
        raise ConfigError(f"{where}._target_={target!r}: {error}; is the package installed?") from error
    except Exception as error:  # it is somebody's own code
        raise ConfigError(f"{where}._target_={target!r}: importing it failed: {of_own_code(error)}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{where}._target_={target!r}: module {module_path} has no {name!r}")
    return getattr(module, name)


def locate_class(target: str, base: type, where: str) -> type:
    """Like `locate`, and it must be a subclass of `base`: the type is the allowlist."""
    found = locate(target, where)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ConfigError(f"{where}._target_={target!r} is no {base.__name__} (see {base.__module__}.{base.__name__})")
    return found


def class_of(node: Any, base: type, where: str) -> type:
    """The class that a node names, a subclass of `base`."""
    if not hasattr(node, "_target_"):
        raise ConfigError(f"{where} has no _target_: it must name the class of a {base.__name__}")
    return locate_class(node._target_, base, where)


def run_check(cls: type, node: Any, where: str, advice: str, *given: Any, hook: str = "check") -> None:
    """Call `cls.check(node, where, *given)`, or another `hook` that refuses.

    `advice` is what to do where it reads what the node does not have.
    """
    try:
        getattr(cls, hook)(node, where, *given)
    except PrlError:
        raise
    except Exception as error:  # somebody's own class
        if isinstance(error, AttributeError) and error.obj is node:
            raise ConfigError(
                f"{where}: {cls.__name__} reads {error.name!r}, which its config does not have: {advice}"
            ) from error
        raise ConfigError(f"{where}: {cls.__name__}.{hook} failed: {of_own_code(error)}") from error


def locate_call(node: Any, where: str) -> functools.partial:
    """The function of one argument that a node names, with the keyword arguments in its `kwargs`, or else its knobs.

    It must be written in Python: builtins and classes are refused, and so is what cannot be called in this way.
    """
    target = node.get("_target_") if isinstance(node, dict) else getattr(node, "_target_", None)
    if target is None:
        raise ConfigError(f"{where} has no _target_: it must name a function")
    settings = knobs(node)
    settings, found = settings.get("kwargs", settings), locate(target, where)
    if not inspect.isfunction(found):
        raise ConfigError(f"{where}._target_={target!r} is not a Python function")
    if inspect.iscoroutinefunction(found):
        raise ConfigError(f"{where}._target_={target!r} is async: nothing awaits it")
    try:
        inspect.signature(found).bind(None, **settings)
    except TypeError as error:
        raise ConfigError(f"{where}: {target}{inspect.signature(found)} cannot be called: {error}") from error
    return functools.partial(found, **settings)


def knobs(node: Any) -> dict[str, Any]:
    """The settings of a config node (a dataclass instance or a dict) without its `_target_`."""
    items = vars(node) if hasattr(node, "__dataclass_fields__") else node
    return {key: value for key, value in items.items() if key != "_target_"}
