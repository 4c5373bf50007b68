"""What a class or function takes by name: types, bounds and defaults of its options, read from its signature.

Bounds stand beside the option (`Annotated[int, Ge(1)]`), choices are a `Literal`. Hydra is given the same as a
dataclass (`schema_of`).
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a class or function takes by name. Not to be changed."""

    annotations: dict[str, Any]
    defaults: dict[str, Any]
    """MISSING where one is required."""
    any_other: bool
    """Whether it takes any other name as well."""

    @property
    def required(self) -> set[str]:
        """The names of options without a default."""
        return {name for name, default in self.defaults.items() if default == MISSING}


@functools.cache
def options_taken(target: Any) -> Options:
    """The options of a class or function.

    A constructor with `**options` passes them to its base class, so the base class's options count as well. A class may
    keep its options in a dataclass, its attribute `Config`.
    """
    config = options_taken(target.Config) if hasattr(target, "Config") else Options({"_target_": str}, {}, False)
    annotations = {name: kind for name, kind in config.annotations.items() if name != "_target_"}
    defaults = {name: default for name, default in config.defaults.items() if name != "_target_"}
    owners = [cls for cls in inspect.getmro(target) if "__init__" in vars(cls)][:-1] if inspect.isclass(target) else []
    passes_on = False
    for owner in owners or (target,):
        signature = signature_of(vars(owner)["__init__"] if owners else target)
        made = {field.name: field for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else {}
        for name, parameter in signature.parameters.items():
            if parameter.kind in NAMED and name not in annotations and not (owners and name == "self"):
                annotations[name] = parameter.annotation
                default = MISSING if parameter.default is parameter.empty else parameter.default
                field = made.get(name)
                factory = None if field is None else field.default_factory
                defaults[name] = factory() if callable(factory) else default
        passes_on = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        if not passes_on:
            break
    return Options(annotations, defaults, passes_on and not hasattr(target, "Config"))


def signature_of(call: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function, in which an annotation that only a type checker can resolve is Any."""
    try:
        result = inspect.signature(call, eval_str=True)
    except Exception:  # whatever evaluating an annotation raises
        result = inspect.signature(call)
    unknown = [
        name for name, p in result.parameters.items() if p.annotation is p.empty or isinstance(p.annotation, str)
    ]
    known = [p.replace(annotation=Any) if name in unknown else p for name, p in result.parameters.items()]
    return result.replace(parameters=known)


@functools.cache
def schema_of(target: type) -> type:
    """A dataclass with `_target_` and a field for every option of `target`, for Hydra's config store.

    A dict that may be null has no type there: Hydra cannot override a typed one that is null.
    """
    entries: list[Any] = [("_target_", str, dataclasses.field(default=f"{target.__module__}.{target.__qualname__}"))]
    options = options_taken(target)
    for name, annotation in options.annotations.items():
        kind = storable(annotation)
        is_dict = any(get_origin(option) is dict for option in get_args(kind))
        own = dataclasses.field(default_factory=functools.partial(copy.deepcopy, options.defaults[name]))
        entries.append((name, Any if is_dict else kind, own))
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


@dataclasses.dataclass(frozen=True, init=False)
class OneOf:
    """The strings that an option may be, where OmegaConf reads the class, which knows no `Literal`."""

    choices: tuple[str, ...]

    def __init__(self, *choices: str):
        object.__setattr__(self, "choices", choices)

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(Literal.__getitem__(self.choices))


Seconds = Annotated[float, Ge(0.001), Le(1e9)]
"""A deadline: a millisecond, for what may be that quick, to some 30 years, which every clock and lock still takes."""
