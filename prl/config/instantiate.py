"""Build a component from its config node: `_target_` names a class, the other keys are its keyword arguments.

This module decides what may be named (a subclass of the component's base class, an ordinary Python function, inside of
both any class of the user's; `prl.config.targets` says of which modules), checks every knob against the signature, and
words the refusals. Hydra's own `instantiate` would copy the objects of nodes inside.

A component is a class whose constructor takes its knobs and nothing else, most simply a keyword-only dataclass. Its
signature is its schema (`prl.config.signature`): types and bounds stand beside each knob.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar, cast, get_args

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from prl.config.signature import check_value, hints_of, parameters, schema_of, storable
from prl.config.targets import entries, locate, refuse_library
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
    with contained(where, f"making {cls.__name__}", cls.__module__):
        knobs = checked_knobs(node, cls, where, live, partial=partial)
        try:
            return functools.partial(cls, **knobs) if partial else cls(**knobs)
        except PrlError:
            raise
        except Exception as error:
            raise ConfigError(f"{where}: {cls.__name__} cannot be made: {of_own_code(error)}") from error


def function(node: Any, where: str, *, values: int = 1) -> "functools.partial[Any]":
    """The function that `node` names with the node's other keys as keyword arguments, to be called with `values` more.

    Raises ConfigError unless it is an ordinary Python function, defined in the package that its path begins with, that
    can be called with so many and those arguments, each within the bounds of its annotation.
    """
    target, found = named(node, "a function", where)
    if not inspect.isfunction(found):
        raise ConfigError(f"{where}._target_={target!r} is not a Python function")
    refuse_foreign(target, found, where)
    if inspect.iscoroutinefunction(found):
        raise ConfigError(f"{where}._target_={target!r} is async: nothing awaits it")
    given = converted(own_arguments(node, found), hints_of(found), where)
    try:
        inspect.signature(found).bind(*[None] * values, **given)
    except TypeError as error:
        raise ConfigError(f"{where}: {target}{inspect.signature(found)} cannot be called: {error}") from error
    return functools.partial(found, **given)


def made_inside(node: dict[str, Any], where: str) -> Any:
    """The object, or with `_partial_: true` the partial, or the function, that a node inside stands for."""
    target, found = named(node, "a class or a function", where)
    if not inspect.isclass(found):
        return function(node, where)
    refuse_foreign(target, found, where)
    if "_args_" in node:
        raise ConfigError(f"{where}._args_: give the arguments of {target} by name")
    return _instantiate(node, object, where, partial=bool(node.get("_partial_")))


def named(node: Any, what: str, where: str) -> tuple[str, Any]:
    """The path of the class or function that a node names, and what is there. Raises ConfigError for a library's."""
    target = target_of(node, what, where)
    refuse_library(target, where)
    return target, locate(target, where)


def refuse_foreign(target: str, found: Any, where: str) -> None:
    """Raise ConfigError where `found`, at the path `target`, is defined in another package than that of the path."""
    kind = "class" if inspect.isclass(found) else "function"
    if found.__module__.split(".")[0] != target.split(".")[0]:
        raise ConfigError(
            f"{where}._target_={target!r} is a {kind} of {found.__module__}, which may not be named: a {kind} must be "
            "defined in the package that its path begins with"
        )


def own_arguments(node: Any, found: Callable[..., Any]) -> dict[str, Any]:
    """The knobs of a node for a function, as `own_knobs`; all of them for one with `**knobs`."""
    return knobs_of(node) if takes_any(found) else own_knobs(node, inspect.signature(found).parameters)


def takes_any(found: Callable[..., Any]) -> bool:
    """Whether a function has `**settings`."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(found).parameters.values())


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
    constructors = [vars(each)["__init__"] for each in cls.__mro__[:-1] if "__init__" in vars(each)]
    # With `**settings` that go to no other class, one takes any.
    free = bool(constructors) and all(map(takes_any, constructors)) and not hasattr(cls, "Config")
    for name in [name for name in given if name not in accepted]:
        if name in live or not free:
            inherited = [base.__name__ for base in cls.__mro__ if name in parameters(base) and name not in live]
            if not inherited:
                raise no_such_knob(f"{where}.{name}", cls.__name__, accepted)
            remedy = f"{inherited[0]} has: let __init__ take **knobs, and pass them to super().__init__"
            raise ConfigError(f"{where}.{name}: {cls.__name__} has no such knob; {remedy}")
    hints = {name: hint for name, (hint, _) in accepted.items()}
    schema = None if free else schema_of(cls, overridable=False)
    return converted(given, hints, where, schema, partial=partial)


def converted(
    given: dict[str, Any], hints: Mapping[str, Any], where: str, schema: Any = None, *, partial: bool = False
) -> dict[str, Any]:
    """`given` as annotations want it, with objects in place of nodes. Raises ConfigError naming the key.

    A `schema` has the values of the rest, and says what must be given; with `partial` nothing must.
    """
    others = [name for name in given if name not in hints or has_node(given[name])]
    made = {name: with_made(given[name], f"{where}.{name}") for name in others}
    rest = {name: value for name, value in given.items() if name not in made}
    fields = [(name, storable(hints[name]), dataclasses.field(default=MISSING)) for name in rest]
    typed = _typed(rest, schema or dataclasses.make_dataclass("Arguments", fields), where)
    missing = sorted(OmegaConf.missing_keys(typed) - made.keys())
    if missing and not partial:
        key = f"{where}.{missing[0]}"
        raise ConfigError(f"{key} has no value: give one, {key}=<value>")
    names = [name for name in map(str, typed) if name not in ("_target_", *missing, *made)]
    kept = {
        name: OmegaConf.to_object(typed[name]) if OmegaConf.is_config(typed[name]) else typed[name] for name in names
    }
    kept |= made
    for name, value in kept.items():
        check_value(hints.get(name, Any), value, f"{where}.{name}")
    return kept


def has_node(value: Any) -> bool:
    """Whether a value is a node with a `_target_`, or has one in it."""
    return (isinstance(value, dict) and "_target_" in value) or any(has_node(item) for _, item in entries(value))


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


def _typed(given: dict[str, Any], schema: Any, where: str) -> DictConfig:
    """A schema with the `given` values: a dataclass is merged key by key, a dict replaces the default."""
    typed: DictConfig = OmegaConf.structured(schema)
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


def with_made(value: Any, where: str) -> Any:
    """`value` with every node in it as what that stands for, or as None where it names nothing, in any depth."""
    if isinstance(value, list):
        return [with_made(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if "_target_" not in value:
        return {name: with_made(item, f"{where}.{name}") for name, item in value.items()}
    if value["_target_"] == MISSING:
        raise ConfigError(f"{where}._target_ has no value: give the dotted path of your function")
    if value["_target_"] is not None:
        return made_inside(value, where)
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
