"""Write the files under `conf/`: each option shows all of its fields, with their defaults, types and a line of meaning.

    python -m prl.tools.write_conf [--check]

Above `MARK` a file is written by hand, and what it sets is left out below. A new option begins with a comment and its
`_target_`. `--check` writes nothing, and fails if a file is not as it would be written.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import re
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from omegaconf import MISSING

from prl.config import orchestrator as orchestrator_config
from prl.config import schema
from prl.config import trainer as trainer_config
from prl.config.build import located, options_taken
from prl.config.compose import CONF, OF_TRAINER, options
from prl.config.evaluation import EvaluationConfig
from prl.engines import renderer
from prl.engines.sampler import Sampler

MARK = "# --- what follows is the code's, by python -m prl.tools.write_conf; other values go above this line"
COMMANDS = {
    "train": schema.TrainConfig,
    "serve": schema.ServeConfig,
    "tinker": schema.TinkerConfig,
    "eval": EvaluationConfig,
}
OWN = {"train": {"sweep"}, "serve": set[str](), "tinker": {"trainer"}, "eval": {"model"}}
"""Keys of a command that are named as a group is and filled by no option of it."""
DESCRIBED: dict[str, Any] = {
    "env/_fields": schema.EnvConfig,
    "filters/none": schema.FiltersConfig,
    "model": schema.ModelConfig,
    "sampling/default": Sampler,
    "teacher": schema.TeacherConfig,
}
"""Dataclasses with the fields of options that name no class, by group or option."""
SCHEMAS: dict[str, Any] = {}
"""Dataclasses with the options of classes and functions, by the path of those."""
for module in (schema, orchestrator_config, renderer, trainer_config):
    named = [cls for cls in vars(module).values() if getattr(cls, "_target_", MISSING) != MISSING]
    SCHEMAS |= {cls._target_: cls for cls in named}
COMPONENTS = ("algo", "curriculum", "filter", "launcher", "monitor", "sampling", "schedule", "weights")
"""Groups whose options are components with the fields of their constructors."""
WIDTH = 120


def classes() -> dict[str, Any]:
    """Return the class or dataclass that says which fields an option has, by `<group>/<name>`."""
    result: dict[str, Any] = {}
    for file in sorted(CONF.glob("*/*.yaml")):
        path = f"{file.parent.name}/{file.stem}"
        node = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        target = node.get("_target_", "")
        described = DESCRIBED.get(path) or DESCRIBED.get(path.partition("/")[0]) or SCHEMAS.get(target)
        if described is None and target.startswith("prl."):
            described = located(node, path)
            described = getattr(described, "Config", described)
        if described is not None:
            result[path] = described
    return result


def pages() -> dict[Path, str]:
    """The files of all commands and options, by path, as they are to be."""
    texts = {}
    for path, described in classes().items():
        file = CONF / f"{path}.yaml"
        texts[file] = page(file, path, described, OF_TRAINER if path == "trainer/default" else ())
    for command, root in COMMANDS.items():
        groups = {*options(), "envs", "run"} - OWN[command]
        texts[CONF / f"{command}.yaml"] = page(CONF / f"{command}.yaml", command, root, groups)
    return texts


def page(file: Path, path: str, described: Any, groups: Collection[str] = ()) -> str:
    """The text of a file. `path` is `<group>/<name>` for an option; `groups` are what other options fill."""
    group = path.partition("/")[0]
    own = file.read_text(encoding="utf-8").partition(MARK)[0].rstrip()
    given = {*groups, *(yaml.safe_load(own) or {})}
    fields = [lines for key, lines in node_of(group, described) if key not in given]
    if path == "train":  # beside what the options of `model` set
        trained = fields_of(schema.PolicyModelConfig, {}, "  ")
        fields += ["model:", *(lines for key, lines in trained if key in ("freeze", "lora"))]
    if path in ("train", "eval"):  # the options of `sampling` set some of them, for an env as well
        fields += ["sampling:", *(lines for _, lines in node_of("sampling", Sampler, "  "))]
    if group == "sampling":
        fields = [textwrap.indent(lines, "# ") for lines in fields]
    return "\n".join([own, *(["", MARK] if fields else []), *fields]) + "\n"


def node_of(group: str, described: Any, indent: str = "") -> Iterator[tuple[str, str]]:
    """As `fields_of`, with the `_target_` of a component that is described by its own class."""
    if group in COMPONENTS:
        yield "_target_", f"{indent}_target_: {described.__module__}.{described.__qualname__}"
    yield from fields_of(described, {}, indent)


def fields_of(described: Any, values: Mapping[str, Any], indent: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a node, each with its lines: what it is, and its default, or what it is in `values`."""
    docs, taken = docs_of(described), options_taken(described)
    for name, annotation in taken.annotations.items():
        value = values.get(name, taken.defaults[name])
        sentence = re.split(r"(?<=\.) (?=[A-Z`])", docs.get(name, ""))[0].rstrip(".")
        if dataclasses.is_dataclass(value):
            below = [lines for _, lines in fields_of(type(value), vars(value), f"{indent}  ")]
        elif isinstance(value, dict):
            below = [f"{indent}  {key}: {as_yaml(each)}" for key, each in value.items()]
        else:
            below = []
        if below:
            yield name, "\n".join([*comment(sentence, "", indent), f"{indent}{name}:", *below])
        else:
            kind = "" if name.startswith("_") else type_of(annotation)
            yield name, "\n".join([*comment(sentence, kind, indent), f"{indent}{name}: {as_yaml(value)}"])


def comment(sentence: str, kind: str, indent: str) -> list[str]:
    """Return what a key is, in a line or more of comments; none where nothing is said of it."""
    message = f"{sentence} ({kind})" if sentence and kind else sentence or kind
    return [f"{indent}# {line}" for line in textwrap.wrap(message, WIDTH - len(indent) - 2, break_on_hyphens=False)]


def as_yaml(value: Any) -> str:
    """A value as it stands behind its key."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=math.inf)).removesuffix("...\n").strip()


def type_of(annotation: Any) -> str:
    """A type in words, with its bounds and choices."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [
            f" {sign} {getattr(bound, at):g}"
            for bound in args[1:]
            for kind, at, sign in ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))
            if isinstance(bound, kind) and math.isfinite(getattr(bound, at))
        ]
        base, null, _ = type_of(args[0]).partition(" or null")
        return base + ",".join(bounds) + null
    if origin is Literal:
        return ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join("null" if each is types.NoneType else type_of(each) for each in args)
    if origin is Callable:
        return "function"
    if origin is not None and args:
        return f"{origin.__name__} of {', '.join(type_of(each) for each in args)}"
    return "any" if annotation is Any else str(getattr(annotation, "__name__", annotation))


# --- what the code says -----------------------------------------------------------------------------------------------


@functools.cache
def docs_of(described: Any) -> dict[str, str]:
    """The docstrings under the fields of a class and of its base classes, by field."""
    result: dict[str, str] = {}
    for cls in reversed(inspect.getmro(described)) if inspect.isclass(described) else ():
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError, SyntaxError, ValueError):  # no source: made by make_dataclass, or built in
            continue
        result |= {
            ast.unparse(field.target): " ".join(str(doc.value.value).split())
            for field, doc in itertools.pairwise(tree.body if isinstance(tree, ast.ClassDef) else [])
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
        }
    return result


def main(arguments: list[str]) -> None:
    """Write the files that are not as they are to be, or with `--check` end with status 1 naming them."""
    stale = {path: text for path, text in pages().items() if path.read_text(encoding="utf-8") != text}
    if "--check" in arguments and stale:
        sys.exit("\n".join(f"{path} is out of date: python -m prl.tools.write_conf" for path in stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
