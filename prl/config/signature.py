"""A component's schema, read from its constructor: types, defaults and bounds of its knobs.

Bounds stand beside the knob (`Annotated[int, Ge(1)]`), choices are a `Literal`.
"""

import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from prl.config.bounds import hints_of


@functools.cache
def parameters(target: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """The knobs of a class or function: name -> (annotation, default), `inspect.Parameter.empty` where required.

    A constructor with `**kwargs` passes them to its base class, so the base class's knobs count as well. A class may
    keep its knobs in a dataclass, its attribute `Config`, and take them as `**knobs`. The default of a dataclass field
    with a factory is the field itself.
    """
    if not inspect.isclass(target):
        return _parameters(target, target)
    config = getattr(target, "Config", None)
    found: dict[str, tuple[Any, Any]] = {}
    if config is not None:  # its `_target_` names the class itself
        found |= {name: entry for name, entry in parameters(config).items() if name != "_target_"}
    for cls in target.__mro__:
        if "__init__" not in vars(cls) or cls is object:
            continue
        constructor = vars(cls)["__init__"]
        found = _parameters(constructor, cls) | found
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(constructor).parameters.values()):
            break
    return found


def _parameters(call: Callable[..., Any], owner: Any) -> dict[str, tuple[Any, Any]]:
    """The knobs of one constructor. `owner` is its class, whose annotations count where it is a dataclass."""
    generated = "__dataclass_params__" in vars(owner) and vars(owner)["__dataclass_params__"].init
    hints = hints_of(owner) if generated else hints_of(call)
    fields = {field.name: field for field in dataclasses.fields(owner)} if generated else {}
    found = {}
    for parameter in inspect.signature(call).parameters.values():
        if parameter.name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        field = fields.get(parameter.name)
        has_factory = field is not None and field.default_factory is not dataclasses.MISSING
        found[parameter.name] = (hints.get(parameter.name, Any), field if has_factory else parameter.default)
    return found


@functools.cache
def schema_of(target: Callable[..., Any], *, overridable: bool = True) -> type:
    """A dataclass with `_target_` and a field for every knob of `target`, for Hydra's config store.

    A plain config dataclass keeps the `_target_` that it declares, or has none; `SOURCE` of the result is `target`. An
    `overridable` schema leaves a dict that may be null without a type: Hydra cannot override a typed one that is null.
    """
    is_config = is_config_dataclass(target)
    path = f"{target.__module__}.{target.__qualname__}"
    entries: list[Any] = [] if is_config else [("_target_", str, dataclasses.field(default=path))]
    for name, (annotation, default) in parameters(target).items():
        if isinstance(default, dataclasses.Field):
            field = dataclasses.field(default_factory=default.default_factory)
        elif default is inspect.Parameter.empty:
            field = dataclasses.field(default=MISSING)
        elif default.__class__.__hash__ is None:  # mutable
            field = dataclasses.field(default_factory=functools.partial(copy.deepcopy, default))
        else:
            field = dataclasses.field(default=default)
        kind = _storable(annotation)
        is_dict = any(get_origin(option) is dict for option in get_args(kind))
        entries.append((name, Any if is_dict and overridable else kind, field))
    name = target.__name__ if is_config else f"{target.__name__}Config"
    return dataclasses.make_dataclass(name, entries, namespace={"SOURCE": target})


def is_config_dataclass(target: Any) -> bool:
    """Whether it is a dataclass of knobs rather than a component: by its name, which ends in Config."""
    return dataclasses.is_dataclass(target) and getattr(target, "__name__", "").endswith("Config")


def restore(value: Any) -> Any:
    """`value` with each node whose schema was made from a config dataclass as an instance of that dataclass.

    Keys that `+key=value` added become attributes of it.
    """
    if isinstance(value, dict):
        return {key: restore(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    items = {name: restore(item) for name, item in vars(value).items()}
    source = getattr(value, "SOURCE", None)
    if source is not None and is_config_dataclass(source):
        value = source(**{field.name: items.pop(field.name) for field in dataclasses.fields(source)})
    for name, item in items.items():
        setattr(value, name, item)
    return value


def _storable(annotation: Any) -> Any:
    """The annotation as OmegaConf can keep it: without bounds, `Literal` as its values' type, the unknown as Any."""
    if get_origin(annotation) is Annotated:
        return _storable(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        kinds = {type(choice) for choice in get_args(annotation)}
        return kinds.pop() if len(kinds) == 1 else Any
    if get_origin(annotation) in (Union, types.UnionType):
        options = [option if option is types.NoneType else _storable(option) for option in get_args(annotation)]
        annotation = functools.reduce(lambda a, b: a | b, options) if Any not in options else Any
    probe = dataclasses.make_dataclass("Probe", [("value", annotation, dataclasses.field(default=MISSING))])
    try:
        OmegaConf.structured(probe)
    except (OmegaConfBaseException, ValueError, TypeError):
        return Any
    return annotation
