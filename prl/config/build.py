"""Build a component from its config node: `_target_` names a class, the other keys are its options.

The signature of the class is its schema: pydantic reads types, `Annotated` bounds and `Literal`s from it and converts
what the node has. A class whose `__init__` takes `**options` has those of its base class as well. A node with a
`_target_` inside an option becomes an object where the option's type is a class, a `Callable` or anything at all.
"""

import dataclasses
import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import pydantic
from annotated_types import Ge, Le
from omegaconf import MISSING, OmegaConf
from typing_extensions import TypedDict

from prl.base.errors import ConfigError
from prl.base.text import in_one_line
from prl.base.user_code import contained, hook
from prl.config.counterparts import counterpart

T = TypeVar("T")

Seconds = Annotated[float, Ge(0.001), Le(1e9)]
"""A deadline: a millisecond, for what may be that quick, to some 30 years, which every clock and lock still takes."""
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
CHECKED = pydantic.ConfigDict(
    extra="forbid",
    arbitrary_types_allowed=True,
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
    revalidate_instances="always",
)
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""Pydantic's names of the error that there is no such option."""
MISSED = ("missing", "missing_argument", "missing_keyword_only_argument")
"""Pydantic's names of the error that an option has no value."""


def build(node: Any, base: type[T], where: str) -> T:
    """The component that `node` describes, checked by its own `check(where)`.

    Args:
        node: `_target_` and options, as a mapping, a DictConfig or a dataclass instance.
        base: the class that `_target_` must name a subclass of.
        where: the node's config key, for messages.

    Raises:
        ConfigError: the target is not a `base`, an option is unknown, of a wrong type or out of its bounds, or the
            component's own check refuses.
    """
    cls: Any = class_of(node, base, where)
    options = options_of(node, cls, where)
    # Before the constructor is called: its TypeError would name a parameter, not a config key.
    if missing := sorted(options_taken(cls).required - options.keys()):
        raise ConfigError(f"{where}.{missing[0]} has no value: give one, {where}.{missing[0]}=<value>")
    with contained(where, f"making {cls.__name__}"):
        component: T = cls(**options)
    if hasattr(component, "check"):
        with hook(where, component, "check"):
            component.check(where)
    return component


def maker(node: Any, base: Any, where: str, *, values: int = 1) -> "functools.partial[Any]":
    """The class or function that `node` names with its options set: a partial, called with live objects later.

    Args:
        node: `_target_` and options, as for `build`.
        base: the class that `_target_` must name a subclass of, whose required parameters are the live objects; or
            `Callable`, for a function.
        where: the node's config key, for messages.
        values: the number of live objects that a function is called with, by position.

    Raises:
        ConfigError: as `build`, and for a function that cannot be called with so many values and these options.
    """
    if base is not Callable:
        cls: Any = class_of(node, base, where)
        return functools.partial(cls, **options_of(node, cls, where, options_taken(base).required))
    target = located(node, where)
    path = plain(node)["_target_"]
    if not inspect.isroutine(target):
        raise ConfigError(f"{where}._target_={path!r} is not a function")
    if inspect.iscoroutinefunction(target):
        raise ConfigError(f"{where}._target_={path!r} is async: nothing awaits it")
    signature = inspect.signature(target)
    try:
        # Tried with the number of arguments alone, so that a wrong function is refused before the run, not at its first
        # call.
        signature.bind(*[None] * values, **given_of(node))
    except TypeError as error:
        raise ConfigError(f"{where}: {path}{signature} cannot be called: {error}") from error
    return functools.partial(target, **options_of(node, target, where))


# --- targets ----------------------------------------------------------------------------------------------------------


def class_of(node: Any, base: type[T], where: str) -> type[T]:
    """The class that a node names, a subclass of `base`. Raises ConfigError."""
    result = located(node, where)
    if not (inspect.isclass(result) and issubclass(result, base)):
        wanted = f"{base.__module__}.{base.__name__}"
        raise ConfigError(f"{where}._target_={plain(node)['_target_']!r} is not a subclass of {wanted}")
    return result


def located(node: Any, where: str) -> Any:
    """The class or function at the dotted path that is a node's `_target_`. Raises ConfigError."""
    settings = plain(node)
    target = settings.get("_target_") if isinstance(settings, dict) else None
    if not isinstance(target, str) or target == MISSING:
        raise ConfigError(f"{where} has no _target_: give the dotted path of a class or function, my_package.Thing")
    with contained(f"{where}._target_={target!r}", "importing it"):
        module, _, name = target.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:  # the last where there is no dot
            hint = ": pip install 'prl[ray]'" if getattr(error, "name", None) == "ray" else ""
            raise ConfigError(f"{where}._target_={target!r}: {in_one_line(error)}{hint}") from error


def name_of(fn: Callable[..., Any]) -> str:
    """The dotted path of a function, also of one with arguments set, for messages."""
    fn = getattr(fn, "func", fn)
    return f"{fn.__module__}.{fn.__qualname__}"


# --- options ----------------------------------------------------------------------------------------------------------


def options_of(node: Any, target: Any, where: str, live: Collection[str] = ()) -> dict[str, Any]:
    """The options that `node` has for a class or function, as its annotations want them; `live` are none of them.

    Raises ConfigError for one that a class does not take, or of a wrong type, or out of its bounds.
    """
    taken = options_taken(target)
    known = {name: annotation for name, annotation in taken.annotations.items() if name not in live}
    given = given_of(node)
    for name, (default, _) in getattr(target, "RETIRED", {}).items():
        # The config of an older run holds what its class no longer takes. Where that was off, the run goes on without.
        if name not in known and name in given and default | given[name] == default:
            del given[name]
    unknown = [name for name in given if name not in known and taken.other is None]
    if unknown and inspect.isclass(target):
        raise no_such_option(f"{where}.{unknown[0]}", given[unknown[0]], target, known)
    made = {name: instantiated(value, f"{where}.{name}", known.get(name, taken.other)) for name, value in given.items()}
    objects = {name: made[name] for name, value in given.items() if isinstance(value, dict) and "_target_" in value}
    return converted(made, target, where) | objects  # pydantic makes the class itself of a dataclass's subclass


def no_such_option(key: str, value: Any, owner: Any, known: Iterable[str]) -> ConfigError:
    """The error for an option that a class does not take, with the nearest of those that it takes."""
    name = key.rpartition(".")[2]
    bases = [base.__name__ for base in getattr(owner, "__mro__", ()) if name in options_taken(base).annotations]
    if bases and owner.__name__ not in bases:  # else it is no option, but a live object that it is given
        hint = f"{bases[0]} has: let __init__ take **options, and pass them to super().__init__"
    elif name in getattr(owner, "RETIRED", {}):
        hint = owner.RETIRED[name][1]
    else:
        hint = nearest(key, value, known, "its options")
        if not owner.__module__.startswith("prl."):
            hint += "; the option `custom` of its group has no fields but those that you give"
    return ConfigError(f"{key}: {owner.__name__} has no such option; {hint}")


def nearest(key: str, value: Any, known: Iterable[str], all_of_them: str) -> str:
    """Return a hint at the key that was meant: another project's, the `known` name like its last part, or all
    of them."""
    if text := counterpart(key, value):
        return text
    node, dot, name = key.rpartition(".")
    near = difflib.get_close_matches(name, known, n=1)
    written = sorted(set(known) - {"_partial_"})  # which is Hydra's, and the same in every run
    return f"did you mean {node}{dot}{near[0]}?" if near else f"{all_of_them}: {', '.join(written) or 'none'}"


@functools.cache
def adapter_of(target: Any, names: tuple[str, ...]) -> Any:
    """Return the reader of these options of a class or function. Kept, since pydantic takes milliseconds to
    make one."""
    annotations = options_taken(target).annotations
    shape: Any = TypedDict("Options", {name: annotations.get(name, Any) for name in names})  # type: ignore[misc]
    return pydantic.TypeAdapter(pydantic.with_config(CHECKED)(shape))


def converted(given: Mapping[str, Any], target: Any, where: str) -> dict[str, Any]:
    """Values as the annotations of a class or function want them. Raises ConfigError naming the key."""
    try:
        result = dict(adapter_of(target, tuple(given)).validate_python(dict(given)))
        refuse_truth(plain(given), plain(result), where)
        return result
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
    value: Any = given
    parts = [where] if where else []
    for part in problem["loc"]:  # with names of types in it, where an option has several
        value = vars(value) if dataclasses.is_dataclass(value) else value
        items = range(len(value)) if isinstance(value, list | tuple) else value
        if isinstance(items, Mapping | range) and part in items:
            parts.append(str(part))
            value = value[part]
    key = ".".join(parts)
    if problem["type"] in UNKNOWN:
        known = fields_at(target, problem["loc"][:-1])
        raise ConfigError(f"{key}: there is no such key; {nearest(key, problem['input'], known, 'keys there')}")
    if problem["type"] in MISSED and isinstance(problem["loc"][-1], str):
        raise ConfigError(f"{'.'.join([where, *map(str, problem['loc'])]).lstrip('.')} has no value: give one")
    raise ConfigError(f"{key}={str(problem['input'])[:80]}: {problem['msg']}")


def refuse_truth(given: Any, made: Any, where: str) -> None:
    """Raise ConfigError where a number was made of true or false, in any depth: pydantic takes them for 1 and 0.

    Both are plain data.
    """
    if isinstance(given, bool) and isinstance(made, int | float) and not isinstance(made, bool):
        raise ConfigError(f"{where}={str(given).lower()}: a number is wanted")
    if isinstance(given, dict) and isinstance(made, dict):
        for name in given.keys() & made.keys():
            refuse_truth(given[name], made[name], f"{where}.{name}".lstrip("."))
    elif isinstance(given, list) and isinstance(made, list):
        for place, (one, other) in enumerate(zip(given, made, strict=False)):
            refuse_truth(one, other, f"{where}.{place}")


def instantiated(value: Any, where: str, kind: Any) -> Any:
    """`value`, of an option of the type `kind`, with the object in place of every node in it; None where `_target_` is
    null.

    Raises ConfigError for a node where the type wants plain data, before its class is imported, and for one whose class
    the type does not want, before that is called.
    """
    if isinstance(value, list):
        return [instantiated(item, where, type_at(kind)) for item in value]
    if not isinstance(value, dict):
        return value
    if "_target_" not in value:
        return {name: instantiated(item, f"{where}.{name}", type_at(kind, name)) for name, item in value.items()}
    path = value["_target_"]
    if path is None and not settings_of(value):  # configs of earlier runs have such a node for no function
        return None
    # Before anything is imported: a config that somebody else wrote must not run code where plain data is meant.
    classes = classes_of(kind)
    named = f"{where}._target_={str(path)[:80]!r}"
    if not classes:
        raise ConfigError(f"{named}: this option takes plain values, and no object")
    target = located(value, where)
    if inspect.isroutine(target) and {object, Callable} & classes:  # `_partial_` or not: an option takes the function
        return maker(value, Callable, where)
    if not (inspect.isclass(target) and issubclass(target, tuple(classes))):
        raise ConfigError(f"{named} makes no {' or '.join(sorted(cls.__name__ for cls in classes))}")
    options = options_of(value, target, where)
    if value.get("_partial_"):
        return functools.partial(target, **options)
    with contained(where, f"making {path}"):
        return target(**options)


def alternatives(kind: Any) -> list[Any]:
    """The types that a type is a union of; itself alone where it is none."""
    if get_origin(kind) is Annotated:
        return alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [each for part in get_args(kind) for each in alternatives(part)]
    return [kind]


def classes_of(kind: Any) -> set[Any]:
    """The classes whose objects an option of the type `kind` takes: `object` for any, none where it is plain data."""
    found = {get_origin(each) or each for each in alternatives(kind)} - {Literal}
    unknown = {cls for cls in found if cls is Any or not inspect.isclass(cls) or getattr(cls, "_is_protocol", False)}
    plain = {cls for cls in found - unknown if cls.__module__ in ("builtins", "collections.abc")} - {object, Callable}
    return found - unknown - plain | ({object} if unknown else set())


def type_at(kind: Any, name: str = "") -> Any:
    """The type of a list's items, or of what is at `name` in a mapping, in an option of the type `kind`."""
    types: list[Any] = [None]
    for each in alternatives(kind):
        if dataclasses.is_dataclass(each):
            types.append(options_taken(cast(Any, each)).annotations.get(name))
        elif each in (dict, list, tuple) or object in classes_of(each):
            types.append(Any)
        elif inspect.isclass(get_origin(each)) and get_origin(each) is not Callable:  # list[X], dict[str, X]
            types += [part for part in get_args(each) if part is not Ellipsis] or [Any]
    return Union[tuple(types)]  # noqa: UP007  of any number


def fields_at(kind: Any, path: Iterable[Any]) -> Iterable[str]:
    """The fields of the dataclass at a path of keys inside `kind`; none where there is another type."""
    for part in path:
        if dataclasses.is_dataclass(kind):
            fields = options_taken(cast(Any, kind)).annotations
            kind = fields.get(part, kind)  # pydantic also names the class, of several that an option may be
        else:  # dict[str, X]
            kind = get_args(kind)[-1] if get_origin(kind) is dict else None
        if get_origin(kind) is not dict:  # X | None
            kind = next((each for each in get_args(kind) if dataclasses.is_dataclass(each)), kind)
    return options_taken(cast(Any, kind)).annotations if dataclasses.is_dataclass(kind) else ()


# --- typed values -----------------------------------------------------------------------------------------------------


def read(kind: type[T], given: Mapping[str, Any], where: str = "") -> T:
    """The dataclass `kind` with given values, as its annotations want them, in any depth.

    Where `_target_` names a class of the user's own, that class may have options beside the fields of `kind`: they are
    fields of the result as well. Raises ConfigError naming the first key that is unknown, of a wrong type or out of
    its bounds.
    """
    taken = options_taken(cast(Any, kind))
    further = {name: value for name, value in given.items() if name not in taken.annotations}
    # Only a node with further options has its class imported here: prl's trainer takes seconds, and has none.
    known = own_options(located(given, where), kind) if further and "_target_" in given else set()
    if unknown := [name for name in further if name not in known]:
        key = f"{where}.{unknown[0]}".lstrip(".")
        hint = nearest(key, further[unknown[0]], taken.annotations.keys() - HYDRA_KEYS, "keys there")
        raise ConfigError(f"{key}: there is no such key; {hint}")
    values = converted({name: value for name, value in given.items() if name not in further}, kind, where)
    if missing := sorted(taken.required - given.keys()):
        key = f"{where}.{missing[0]}".lstrip(".")
        raise ConfigError(f"{key} has no value: give one, {key}=<value>")
    result: T = extended(cast(Any, kind), tuple(further))(**values, **further)
    return result


@functools.cache  # else equal configs would be of different classes, and so not equal
def extended(kind: Any, names: tuple[str, ...]) -> Any:
    """Return the dataclass `kind` with further fields of any type."""
    further = [(name, Any) for name in names]
    return dataclasses.make_dataclass(kind.__name__, further, bases=(kind,), kw_only=True) if names else kind


def own_options(target: Any, config: Any) -> set[str]:
    """The options of a class beside those of the class that it extends, whose `Config` is `config`."""
    # The first class with this very `Config` is prl's: what its subclasses add is the user's.
    extended = [cls for cls in getattr(target, "__mro__", ()) if vars(cls).get("Config") is config]
    return set(options_taken(target).annotations) - set(options_taken(extended[0]).annotations) if extended else set()


def check_node(node: Any, key: str) -> None:
    """Raise ConfigError for a node that names no class or function."""
    settings = plain(node)
    if isinstance(settings, dict) and isinstance(settings.get("_target_"), str):
        return
    group = key.rpartition(".")[2]
    own = f"+{group}@{key}" if key.startswith("envs.") else group
    raise ConfigError(f"{key}={str(node)[:80]} has no _target_: choose an option of its group, {own}=<name>")


# --- signatures -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that a class or function takes by name. Not to be changed."""

    annotations: dict[str, Any]
    defaults: dict[str, Any]
    """MISSING where one is required."""
    other: Any
    """The type of any other name that it takes as well; None where it takes none."""

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
    config = options_taken(target.Config) if hasattr(target, "Config") else Options({}, {}, None)
    annotations = {name: kind for name, kind in config.annotations.items() if name not in HYDRA_KEYS}
    defaults = {name: default for name, default in config.defaults.items() if name not in HYDRA_KEYS}
    # The constructors from the class itself upwards, without that of `object`.
    owners = [cls for cls in inspect.getmro(target) if "__init__" in vars(cls)][:-1] if inspect.isclass(target) else []
    other = None
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
        other = next((p.annotation for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        if other is None:
            break
    return Options(annotations, defaults, None if hasattr(target, "Config") else other)


def signature_of(call: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function, in which an annotation that only a type checker can resolve is Any."""
    try:
        # `from __future__ import annotations` makes texts of them. Some name what is imported for type checkers only.
        result = inspect.signature(call, eval_str=True)
    except Exception:  # whatever evaluating an annotation raises
        result = inspect.signature(call)
    unknown = [
        name for name, p in result.parameters.items() if p.annotation is p.empty or isinstance(p.annotation, str)
    ]
    known = [p.replace(annotation=Any) if name in unknown else p for name, p in result.parameters.items()]
    return result.replace(parameters=known)


# --- nodes ------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """`value` as dicts, lists and scalars: dataclass instances with the options of a class of the user's own."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def settings_of(node: Any) -> dict[str, Any]:
    """The settings of a node without Hydra's own keys."""
    return {key: value for key, value in plain(node).items() if key not in HYDRA_KEYS}


def given_of(node: Any) -> dict[str, Any]:
    """The settings of a node that have a value."""
    return {name: value for name, value in settings_of(node).items() if value != MISSING}


def not_null(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that override others: null is those of the run."""
    return {name: value for name, value in settings.items() if value is not None}


def sampling_of(config: Any, env: str) -> tuple[str, dict[str, Any]]:
    """The key and the node of the sampling settings of an env; a class of the user's own may have further ones."""
    own = config.envs[env].sampling
    return (f"envs.{env}.sampling" if not_null(own) else "sampling"), overridden(config.sampling, own)


def overridden(inherited: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings with others over them. Those that name their class, as the option `default` does, are whole."""
    given = not_null(own)
    return given if "_target_" in given else inherited | given
