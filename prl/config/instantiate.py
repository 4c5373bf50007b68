"""Build a component from its config node: `_target_` names a class, the other keys are its keyword arguments.

Hydra instantiates. This module decides what may be named (a subclass of the component's base class, or an ordinary
Python function; `prl.config.targets` says of which modules), checks every knob against the class's own signature first,
and words the refusals.

A component is a class whose constructor takes its knobs and nothing else, most simply a keyword-only dataclass. Its
signature is its schema (`prl.config.signature`): types and bounds stand beside each knob.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar, cast, get_args

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from prl.config.signature import check_value, hints_of, parameters, schema_of
from prl.config.targets import locate, refuse_library
from prl.errors import ConfigError, PrlError, of_own_code
from prl.user_code import contained, hook

T = TypeVar("T")

HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


def build(node: Any, base: type[T], where: str) -> T:
    """The component that `node` describes, checked by its own `check(where)`.

    Args:
        node: `_target_` and knobs, as a mapping, a DictConfig or a dataclass instance.
        base: the class that `_target_` must name a subclass of.
        where: the node's config key, for messages.

    Raises:
        ConfigError: the target is not a `base`, a knob is unknown, of a wrong type or out of its bounds, or the
            component's own check refuses.
    """
    component: T = _instantiate(node, base, where)
    if hasattr(component, "check"):
        with hook(where, component, "check"):
            component.check(where)
    return component


def factory(node: Any, base: type[T], where: str) -> "functools.partial[T]":
    """Like `build`, for a class whose constructor takes live objects beside its knobs: a partial with the knobs set.

    The live objects are to be passed to the partial: the required parameters of `base`, which are no knobs, and those
    of the class that the node gives no value.
    """
    made: functools.partial[T] = _instantiate(node, base, where, partial=True)
    return made


def _instantiate(node: Any, base: type, where: str, *, partial: bool = False) -> Any:
    cls: type = class_of(node, base, where)
    live = {name for name, (_, default) in parameters(base).items() if partial and default == MISSING}
    target = {"_target_": plain(node)["_target_"], "_partial_": partial, "_convert_": "object"}
    with contained(where, f"making {cls.__name__}", cls.__module__):
        try:
            return instantiate(target | checked_knobs(node, cls, where, live, partial=partial))
        except InstantiationException as error:
            cause = error.__cause__ or error
            if isinstance(cause, PrlError):
                raise cause from None
            raise ConfigError(f"{where}: {cls.__name__} cannot be made: {of_own_code(cause)}") from error
        except OmegaConfBaseException as error:  # of a knob that is a dataclass
            raise ConfigError(f"{where}: {error.full_key}: {str(error.msg or error).splitlines()[0]}") from error


def function(node: Any, where: str, *, values: int = 1) -> "functools.partial[Any]":
    """The function that `node` names with the node's other keys as keyword arguments, to be called with `values` more.

    Raises ConfigError unless it is an ordinary Python function, defined in the package that its path begins with, that
    can be called with so many and those arguments, each within the bounds of its annotation.
    """
    target = target_of(node, "a function", where)
    given = {name: _with_functions(value, f"{where}.{name}") for name, value in knobs_of(node).items()}
    refuse_library(target, where)
    found = locate(target, where)
    if not inspect.isfunction(found):
        raise ConfigError(f"{where}._target_={target!r} is not a Python function")
    if found.__module__.split(".")[0] != target.split(".")[0]:
        raise ConfigError(
            f"{where}._target_={target!r} is a function of {found.__module__}, which may not be named: a function must "
            "be defined in the package that its path begins with"
        )
    if inspect.iscoroutinefunction(found):
        raise ConfigError(f"{where}._target_={target!r} is async: nothing awaits it")
    try:
        inspect.signature(found).bind(*[None] * values, **given)
    except TypeError as error:
        raise ConfigError(f"{where}: {target}{inspect.signature(found)} cannot be called: {error}") from error
    hints = hints_of(found)
    for name, value in given.items():
        check_value(hints.get(name, Any), value, f"{where}.{name}")
    made: functools.partial[Any] = instantiate({"_target_": target, "_partial_": True, "_convert_": "object", **given})
    return made


def name_of(fn: Callable[..., Any]) -> str:
    """The dotted path of a function, also of one with arguments set, for messages."""
    fn = getattr(fn, "func", fn)
    return f"{fn.__module__}.{fn.__qualname__}"


def checked_knobs(
    node: Any, cls: type, where: str, live: Collection[str] = (), *, partial: bool = False
) -> dict[str, Any]:
    """The knobs of `node`, converted and checked by the signature of `cls`. Raises ConfigError naming the key.

    Those that `own_knobs` leaves out are no part of it. Parameters in `live` are no knobs. With `partial`, a knob may
    have no value.
    """
    accepted = {name: knob for name, knob in parameters(cls).items() if name not in live}
    given = own_knobs(node, accepted)
    # Without knobs of its own, a class with `**settings` takes any.
    free = not accepted and any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls).parameters.values())
    for name in [name for name in given if name not in accepted]:
        if name in live or not free:
            inherited = [base.__name__ for base in cls.__mro__ if name in parameters(base) and name not in live]
            if not inherited:
                raise no_such_knob(f"{where}.{name}", cls.__name__, accepted)
            remedy = f"{inherited[0]} has: let __init__ take **knobs, and pass them to super().__init__"
            raise ConfigError(f"{where}.{name}: {cls.__name__} has no such knob; {remedy}")
    given = {name: _with_functions(value, f"{where}.{name}") for name, value in given.items()}
    typed = OmegaConf.create(given, flags={"allow_objects": True}) if free else _typed(given, cls, where)
    missing = sorted(OmegaConf.missing_keys(typed))
    if missing and not partial:
        key = f"{where}.{missing[0]}"
        raise ConfigError(f"{key} has no value: give one, {key}=<value>")
    kept = {
        name: OmegaConf.to_object(typed[name]) if OmegaConf.is_config(typed[name]) else typed[name]
        for name in map(str, typed)
        if name != "_target_" and name not in missing
    }
    for name in kept if accepted else ():
        check_value(accepted[name][0], kept[name], f"{where}.{name}")
    return kept


def own_knobs(node: Any, accepted: Collection[str]) -> dict[str, Any]:
    """The knobs of `node` for a class that takes those in `accepted`.

    Where `_target_` replaces the class that the node's schema was made for, knobs still at that schema's defaults which
    the new class does not take are left out. Plain data has no schema: what another process is to build passes here
    before.
    """
    given, defaults = knobs_of(node), schema_defaults(node)
    if plain(node)["_target_"] == defaults.get("_target_"):
        return given
    unset = object()
    return {name: value for name, value in given.items() if name in accepted or value != defaults.get(name, unset)}


def _typed(given: dict[str, Any], cls: type, where: str) -> DictConfig:
    """The schema of `cls` with the `given` values: a dataclass is merged key by key, a dict replaces the default."""
    schema = schema_of(cls, overridable=False)
    typed: DictConfig = OmegaConf.structured(schema, flags={"allow_objects": True})
    for name, value in given.items():
        annotation = schema.__annotations__[name]
        try:
            if isinstance(value, dict) and any(map(dataclasses.is_dataclass, (annotation, *get_args(annotation)))):
                typed = cast(DictConfig, OmegaConf.merge(typed, {name: value}))
            else:
                typed[name] = value
        except OmegaConfBaseException as error:
            key = error.full_key if str(error.full_key).startswith(name) else name
            raise ConfigError(f"{where}.{key}: {str(error.msg or error).splitlines()[0]}") from error
    return typed


def no_such_knob(key: str, owner: str, knobs: Iterable[str]) -> ConfigError:
    """The error for a knob that a component does not take, with the nearest of those that it takes."""
    return ConfigError(f"{key}: {owner} has no such knob; {nearest(key, knobs, 'its knobs')}")


def nearest(key: str, known: Iterable[str], all_of_them: str) -> str:
    """What may have been meant by the last part of a key: the `known` name that is like it, else a list of them all."""
    node, dot, name = key.rpartition(".")
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {node}{dot}{near[0]}?" if near else f"{all_of_them}: {', '.join(sorted(known)) or 'none'}"


def _with_functions(value: Any, where: str) -> Any:
    """`value` with every node of a function in it as that function, or as None where it names none, in any depth."""
    if isinstance(value, list):
        return [_with_functions(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if "_target_" not in value:
        return {name: _with_functions(item, f"{where}.{name}") for name, item in value.items()}
    if value["_target_"] == MISSING:
        raise ConfigError(f"{where}._target_ has no value: give the dotted path of your function")
    if value["_target_"] is not None:
        return function(value, where)
    if given := knobs_of(value):
        raise ConfigError(f"{where}.{min(given)} is given, but no function: name it with {where}._target_=my.function")
    return None


# --- targets ----------------------------------------------------------------------------------------------------------


def class_of(node: Any, base: type[T], where: str) -> type[T]:
    """The class that a node names, a subclass of `base`: the base class is the allowlist."""
    path = f"{base.__module__}.{base.__name__}"
    target = target_of(node, f"a subclass of {path}", where)
    found = locate(target, where)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ConfigError(f"{where}._target_={target!r} is not a subclass of {path}")
    if inspect.isabstract(found):
        left = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ConfigError(f"{where}._target_={target!r} is abstract: name a subclass that has {left}")
    return found


def target_of(node: Any, what: str, where: str) -> str:
    """The node's `_target_`. Raises ConfigError where there is none."""
    settings = plain(node)
    target = settings.get("_target_") if isinstance(settings, dict) else None
    if not isinstance(target, str) or target == MISSING:
        raise ConfigError(f"{where} has no _target_: it must name {what}")
    return target


# --- nodes ------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """`value` as dicts, lists and scalars: dataclass instances with the keys that `+key=value` added to them."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def knobs_of(node: Any) -> dict[str, Any]:
    """The settings of a node without Hydra's own keys."""
    return {key: value for key, value in plain(node).items() if key not in HYDRA_KEYS}


def schema_defaults(node: Any) -> dict[str, Any]:
    """What the schema of a node says, the `_target_` that it was made for included; empty without a schema."""
    schema = OmegaConf.get_type(node) if OmegaConf.is_config(node) else type(node)
    return plain(schema()) if dataclasses.is_dataclass(schema) else {}
