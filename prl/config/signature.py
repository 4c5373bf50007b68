"""What a class or function takes by name: types, bounds and defaults of its options, read from its signature.

Bounds stand beside the option (`Annotated[int, Ge(1)]`), choices are a `Literal`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

from annotated_types import Ge, Le
from omegaconf import MISSING

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


Seconds = Annotated[float, Ge(0.001), Le(1e9)]
"""A deadline: a millisecond, for what may be that quick, to some 30 years, which every clock and lock still takes."""
