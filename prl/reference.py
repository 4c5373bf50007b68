"""The config reference, `conf/README.md`: every group, its options, and their keys with type, default and meaning.

python -m prl.reference > conf/README.md
"""

import dataclasses
import json
import math
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import MISSING

from prl.compose import CONF, options, schemas
from prl.config.evaluation import EvaluationConfig
from prl.config.schema import EnvConfig, PolicyModelConfig, SamplingConfig, ServeConfig, TeacherConfig, TrainConfig
from prl.config.signature import parameters
from prl.help import described, docs_of, said_of_option

INTRO = """# Config reference

Made from the code by `python -m prl.reference > conf/README.md`; a test holds it up to date. A key is set by
`key=value`, an option chosen by `group=option`. Defaults are those of the code: an option with a link has a conf file,
which may change them. `prl train --help algo=opd` shows an option's keys with the values that they would have."""

PREFIXES = {"filter": "filters.<slot>.<name>.", "monitor": "monitor.<name>."}
"""Where the keys of a group lie, if not under the group's name."""

Row = tuple[str, str, str, str]


def reference() -> str:
    """The page, as Markdown."""
    parts = [INTRO, "## Top level", *table(rows(TrainConfig, ""))]
    parts += [
        "`prl eval` and `prl chat`:",
        *table(rows(EvaluationConfig, "")),
        "`prl serve`:",
        *table(rows(ServeConfig, "")),
    ]
    parts += ["## `envs.<name>`", *table(rows(EnvConfig, "envs.<name>."))]
    for group, names in options().items():
        parts += [f"## `{group}`", *of_group(group, names)]
    return "\n\n".join(parts) + "\n"


def of_group(group: str, names: list[str]) -> Iterator[str]:
    """A group's options, the keys that all of them have, and those of single ones."""
    said = {name: said_of_option(group, name).replace("|", "\\|") for name in names}
    if len({*said.values()}) > 1 or len(names) < 3:
        yield "\n".join(["| option | |", "|---|---|", *(f"| {linked(group, name)} | {said[name]} |" for name in names)])
    else:
        yield ", ".join(linked(group, name) for name in names)
    prefix = PREFIXES.get(group, f"{group}.")
    known = {"model/model": PolicyModelConfig, "teacher/teacher": TeacherConfig} | schemas()
    found = {
        path.partition("/")[2]: rows(schema, prefix) for path, schema in known.items() if path.startswith(f"{group}/")
    }
    every = [row for row in next(iter(found.values()), []) if all(row in each for each in found.values())]
    if len(found) > 1 and every:
        yield "Every option:"
    yield from table(every)
    for name, own in found.items():
        if left := [row for row in own if row not in every]:
            yield f"`{group}={name}`:" if name in names else f"`{name}`:"
            yield from table(left)


def linked(group: str, name: str) -> str:
    """An option, with a link to its file if it has one."""
    return f"[`{name}`]({group}/{name}.yaml)" if (CONF / group / f"{name}.yaml").exists() else f"`{name}`"


def table(found: list[Row]) -> Iterator[str]:
    """Rows as a Markdown table; nothing for none."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in found]
    if lines:
        yield "\n".join(["| key | type | default | |", "|---|---|---|---|", *lines])


def rows(schema: Any, prefix: str) -> list[Row]:
    """The keys of a schema and of the nodes in it: key, type, default, meaning."""
    cls = described(schema)
    followed = docs_of(SamplingConfig) if cls.__name__ in ("EnvSamplingConfig", "EvalSamplingConfig") else {}
    docs, found = followed | docs_of(cls), []
    for name, (annotation, default) in parameters(cls).items():
        if name in ("_target_", "_partial_"):
            continue
        group = not prefix and name in options() and name != "sweep"
        if group and (cls is TrainConfig or annotation is Any):
            found.append((f"`{name}`", "a group", "", docs.get(name) or f"[below](#{name})"))
        elif dataclasses.is_dataclass(default) and not isinstance(default, type):
            found += rows(type(default), f"{prefix}{name}.")
        else:
            found.append((f"`{prefix}{name}`", type_of(annotation), shown(default), docs.get(name, "")))
    return found


def shown(default: Any) -> str:
    """A default as one types it; nothing where there is none."""
    if default is MISSING:
        return ""
    return f"`{default if isinstance(default, str) and default.isprintable() and default else json.dumps(default)}`"


def type_of(annotation: Any) -> str:
    """A type in words, with its bounds and choices."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        choices = [type_of(each) for each in args[1:] if get_origin(each) is Literal]
        signs = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))
        bounds = [
            f" {sign} {getattr(b, at)}"
            for b in args[1:]
            for kind, at, sign in signs
            if isinstance(b, kind) and math.isfinite(getattr(b, at))
        ]
        base, null, _ = type_of(args[0]).partition(" or null")
        return next(iter(choices), base + ",".join(bounds) + null)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if each is types.NoneType else type_of(each) for each in args)
    if origin is Callable:
        return "function"
    if origin is not None and args:
        return f"{origin.__name__} of {', '.join(type_of(each) for each in args)}"
    return "any" if annotation is Any else str(getattr(annotation, "__name__", annotation))


if __name__ == "__main__":
    print(reference(), end="")
