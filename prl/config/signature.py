"""A component's schema, read from its constructor: types, defaults and bounds of its knobs.

Bounds stand beside the knob (`Annotated[int, Ge(1)]`), choices are a `Literal["a", "b"]`. OmegaConf, which knows no
Literal, reads the classes of plain config nodes as they are: there it is `Annotated[str, Literal["a", "b"]]`.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import MISSING, BooleanNode, OmegaConf, ValidationError
from omegaconf.errors import OmegaConfBaseException

from prl.errors import ConfigError

BOUNDS: dict[type, tuple[Callable[[Any, Any], bool], str]] = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "below"),
}
"""What each bound asks of a number and its edge, and its word in messages."""
Seconds = Annotated[float, Ge(0.001), Le(1e9)]
"""A deadline: a millisecond, for what may be that quick, to some 30 years, which every clock and lock still takes."""
LARGEST = 2**63
"""Whole numbers are below this: they go through JSON, tensors and other libraries' integers."""


def to_bool(self: BooleanNode, value: Any) -> bool:
    """As OmegaConf converts what a bool is set to, which takes any other integer than 0 for true."""
    try:
        number = int(value)
    except (TypeError, ValueError):  # of what is none OmegaConf says so, and it knows yes and no
        number = 0
    if number not in (0, 1):
        raise ValidationError("Value '$VALUE' is not a valid bool: write true or false")
    return lenient_to_bool(self, value)


lenient_to_bool = BooleanNode._validate_and_convert_impl
BooleanNode._validate_and_convert_impl = to_bool  # type: ignore[method-assign]


def hints_of(annotated: Any) -> dict[str, Any]:
    """The annotations of a class or function, bounds included, without those that only a type checker can resolve."""
    found: dict[str, Any] = {}
    for owner in reversed(inspect.getmro(annotated)) if inspect.isclass(annotated) else [annotated]:
        for name, annotation in inspect.get_annotations(owner).items():
            alone = types.SimpleNamespace(__annotations__={name: annotation})
            with contextlib.suppress(NameError, AttributeError, TypeError, SyntaxError):
                found |= get_type_hints(alone, vars(sys.modules[owner.__module__]), include_extras=True)
    return found


@functools.cache
def parameters(target: type) -> dict[str, tuple[Any, Any]]:
    """The knobs of a class: name -> (annotation, default), which is MISSING where one is required. Not to be changed.

    A constructor with `**kwargs` passes them to its base class, so the base class's knobs count as well. A class may
    keep its knobs in a dataclass, its attribute `Config`, and take them as `**knobs`.
    """
    found = dict(parameters(target.Config)) if hasattr(target, "Config") else {}
    found.pop("_target_", None)  # of the `Config`: it names the class itself
    for cls in inspect.getmro(target):
        if constructor := vars(cls).get("__init__"):
            found = _own_parameters(cls, constructor) | found
            if all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(constructor).parameters.values()):
                break
    return found


def _own_parameters(cls: type, constructor: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """The knobs of the constructor that `cls` itself has. Where it is a dataclass, its fields say more."""
    fields = dataclasses.fields(cls) if "__dataclass_params__" in vars(cls) else ()
    hints = hints_of(cls if fields else constructor)
    made = {field.name: field.default_factory() for field in fields if field.default_factory is not dataclasses.MISSING}
    return {
        name: (hints.get(name, Any), made.get(name, MISSING if knob.default is knob.empty else knob.default))
        for name, knob in list(inspect.signature(constructor).parameters.items())[1:]  # without `self`
        if knob.kind not in (knob.VAR_KEYWORD, knob.VAR_POSITIONAL)
    }


@functools.cache
def schema_of(target: type, *, overridable: bool = True) -> type:
    """A dataclass with `_target_` and a field for every knob of `target`, for Hydra's config store.

    An `overridable` schema leaves a dict that may be null without a type: Hydra cannot override a typed one that is
    null.
    """
    entries: list[Any] = [("_target_", str, dataclasses.field(default=f"{target.__module__}.{target.__qualname__}"))]
    for name, (annotation, default) in parameters(target).items():
        kind = storable(annotation)
        is_dict = any(get_origin(option) is dict for option in get_args(kind))
        own = dataclasses.field(default_factory=functools.partial(copy.deepcopy, default))
        entries.append((name, Any if is_dict and overridable else kind, own))
    return dataclasses.make_dataclass(f"{target.__name__}Config", entries)


def storable(annotation: Any) -> Any:
    """The annotation as OmegaConf can keep it: without bounds, `Literal` as its values' type, the unknown as Any."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return storable(args[0])
    if origin is Literal:
        kinds = {type(choice) for choice in args}
        return kinds.pop() if len(kinds) == 1 else Any
    if origin in (Union, types.UnionType):
        options = [option if option is types.NoneType else storable(option) for option in args]
        annotation = functools.reduce(operator.or_, options) if Any not in options else Any
    with contextlib.suppress(OmegaConfBaseException, ValueError, TypeError):
        OmegaConf.structured(dataclasses.make_dataclass("Probe", [("value", annotation, MISSING)]))
        return annotation
    return Any


def check_value(annotation: Any, value: Any, key: str) -> None:
    """Raise ConfigError where `value` is outside what its annotation allows, naming `key`.

    Looks into dataclasses field by field, into mappings and lists entry by entry. Of several types, a `Literal` is for
    strings, unless other strings are allowed too.
    """
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    others = [option for option in options if get_origin(option) is not Literal and option is not types.NoneType]
    if (value is None and types.NoneType in options) or (isinstance(value, str) and str in others):
        return
    if len(others) > 1 and not is_plain(value):  # of one of them
        return
    if choices and (isinstance(value, str) or not others):
        if value not in choices:
            *names, last = [str(choice) for choice in choices] + ["null"] * (types.NoneType in options)
            raise ConfigError(f"{key}={value!r}: choose {', '.join(names)}{' or ' * bool(names)}{last}")
    else:
        for option in others:
            _check_option(option, value, key)


def is_plain(value: Any) -> bool:
    """Whether a value is one that a config holds, rather than an object that was made of a node."""
    return value is None or isinstance(value, str | int | float | list | tuple | Mapping)


def is_class(kind: Any) -> bool:
    """Whether an annotation is a class that an object is of or is not."""
    return inspect.isclass(kind) and kind not in (Any, Annotated) and not getattr(kind, "_is_protocol", False)


def _check_option(annotation: Any, value: Any, key: str) -> None:
    """`check_value` for an annotation that is neither a union nor a choice."""
    origin, args = get_origin(annotation), get_args(annotation)
    prefix = f"{key}." if key else ""
    kind = origin or annotation
    schema = isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
    if (schema and not isinstance(value, annotation | Mapping)) or (  # by an interpolation
        not is_plain(value) and is_class(kind) and not isinstance(value, kind)
    ):
        wanted = getattr(annotation, "__name__", str(annotation))
        raise ConfigError(f"{key} must be {wanted}, got {type(value).__name__} {str(value)[:80]!r}")
    if origin is Annotated:
        if value is not None:
            _check_bounds(args[1:], value, key)
        for each in args:
            check_value(each, value, key)
    elif annotation in (int, float):
        _check_finite(value, key)
    elif annotation is bool and value not in (True, False):  # set from Python
        raise ConfigError(f"{key} must be true or false, got {value!r}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, (hint, _) in parameters(type(value)).items():
            check_value(hint, getattr(value, name), prefix + name)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            check_value(args[-1] if args else Any, item, f"{prefix}{name}")
    elif isinstance(value, list | tuple) and args:
        fixed = origin is tuple and Ellipsis not in args
        if fixed and len(value) != len(args):
            raise ConfigError(f"{key} must be {len(args)} values, got {list(value)}")
        for kind, item in zip(args if fixed else [args[0]] * len(value), value, strict=False):
            check_value(kind, item, key)


def _check_finite(value: Any, key: str) -> None:
    """Refuse a number that is none or infinite, and a whole one that does not fit into 64 bits."""
    if isinstance(value, int | float) and not abs(value) < (LARGEST if isinstance(value, int) else float("inf")):
        raise ConfigError(f"{key} must be a finite number of at most 19 digits, got {str(value)[:40]}")


def _check_bounds(constraints: tuple[Any, ...], value: Any, key: str) -> None:
    """`Ge`, `Gt`, `Le` and `Lt` of a number, which must be finite too; of a list or tuple, of each of its numbers."""
    bounds = [(*BOUNDS[type(bound)], *dataclasses.astuple(bound)) for bound in constraints if type(bound) in BOUNDS]
    for number in value if isinstance(value, list | tuple) else [value]:
        if bounds and not isinstance(number, int | float):
            raise ConfigError(f"{key} must be a number, got {number!r}")
        if bounds and not (abs(number) < float("inf") and all(keeps(number, edge) for keeps, _, edge in bounds)):
            words = " and ".join(f"{word} {edge}" for _, word, edge in bounds)
            words = re.sub(r"^at least (\S+) and (at most )?", r"from \1 to ", words)  # from 0 to 1, from 0 to below 1
            raise ConfigError(f"{key} must be {words}, got {value}")
