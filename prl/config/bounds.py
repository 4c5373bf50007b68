"""Bounds that stand beside a knob: `Annotated[int, Ge(1)]`, `Literal["a", "b"]`."""

import contextlib
import dataclasses
import inspect
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from prl.errors import ConfigError


def hints_of(annotated: Any) -> dict[str, Any]:
    """The annotations of a class or function, bounds included, without those that only a type checker can resolve."""
    found: dict[str, Any] = {}
    for owner in reversed(annotated.__mro__) if inspect.isclass(annotated) else [annotated]:
        own = vars(owner).get("__annotations__", {}) if inspect.isclass(owner) else owner.__annotations__
        for name, annotation in own.items():
            alone = types.SimpleNamespace(__annotations__={name: annotation})
            found.pop(name, None)
            with contextlib.suppress(NameError, AttributeError, TypeError, SyntaxError):
                found |= typing.get_type_hints(alone, vars(sys.modules[owner.__module__]), include_extras=True)
    return found


def check_value(annotation: Any, value: Any, key: str) -> None:
    """Raise ConfigError where `value` is outside what its annotation allows, naming `key`.

    Looks into dataclasses field by field, into mappings and lists entry by entry.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if value is not None:
            _check_bounds(args[1:], value, key)
        check_value(args[0], value, key)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = hints_of(type(value))
        for field in dataclasses.fields(value):
            check_value(hints.get(field.name, Any), getattr(value, field.name), _joined(key, field.name))
    elif origin is Literal:
        _check_choice(args, value, key)
    elif origin in (Union, types.UnionType):
        _check_union(args, value, key)
    elif isinstance(value, Mapping):
        of = args[1] if isinstance(origin, type) and issubclass(origin, Mapping) else Any
        for name, item in value.items():
            check_value(of, item, _joined(key, str(name)))
    elif isinstance(value, list | tuple) and args:
        if origin is tuple and Ellipsis not in args and len(value) != len(args):
            raise ConfigError(f"{key} must be {len(args)} values, got {list(value)}")
        kinds = args if origin is tuple and Ellipsis not in args else [args[0]] * len(value)
        for kind, item in zip(kinds, value, strict=False):
            check_value(kind, item, key)


def _check_union(options: tuple[Any, ...], value: Any, key: str) -> None:
    """`value` has to fit the options; a choice of names is only one of them where other strings are allowed too."""
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    others = [option for option in options if get_origin(option) is not Literal and option is not types.NoneType]
    if value is None and types.NoneType in options:
        return
    if choices and (not others or (isinstance(value, str) and str not in others)):
        return _check_choice((*choices, *([None] if types.NoneType in options else [])), value, key)
    for option in others if not (isinstance(value, str) and str in others) else ():
        check_value(option, value, key)


def _check_choice(choices: tuple[Any, ...], value: Any, key: str) -> None:
    if value not in choices:
        *names, last = ["null" if choice is None else str(choice) for choice in choices]
        listed = ", ".join(names) + " or " * bool(names) + last
        raise ConfigError(f"{key}={value!r}: choose {listed}")


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _check_bounds(constraints: tuple[Any, ...], value: Any, key: str) -> None:
    """`Ge`, `Gt`, `Le` and `Lt` of a number, which must be finite too; of a list or tuple, of each of its numbers."""
    low = next((c for c in constraints if isinstance(c, Ge | Gt)), None)
    high = next((c for c in constraints if isinstance(c, Le | Lt)), None)
    if low is None and high is None:
        return
    for number in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(number, int | float):
            raise ConfigError(f"{key} must be a number, got {number!r}")
        if not (math.isfinite(number) and _keeps_low(low, number) and _keeps_high(high, number)):
            raise ConfigError(f"{key} must be {_words(low, high)}, got {value}")


def _keeps_low(low: Ge | Gt | None, number: float) -> bool:
    if low is None:
        return True
    edge: Any = low.ge if isinstance(low, Ge) else low.gt  # a number; annotated_types allows anything with an order
    return bool(number >= edge if isinstance(low, Ge) else number > edge)


def _keeps_high(high: Le | Lt | None, number: float) -> bool:
    if high is None:
        return True
    edge: Any = high.le if isinstance(high, Le) else high.lt
    return bool(number <= edge if isinstance(high, Le) else number < edge)


def _words(low: Ge | Gt | None, high: Le | Lt | None) -> str:
    """The range in words: at least 1; above 0; from 0 to 1; from 0 to below 1; above 0 and below 1."""
    start = "" if low is None else f"at least {low.ge}" if isinstance(low, Ge) else f"above {low.gt}"
    end = "" if high is None else f"at most {high.le}" if isinstance(high, Le) else f"below {high.lt}"
    if low is None or high is None:
        return start or end
    if isinstance(low, Ge):
        return f"from {low.ge} to {high.le if isinstance(high, Le) else end}"
    return f"{start} and {end}"
