"""Write the files under `conf/`: each option shows all of its fields, with their defaults, types and a line of meaning.

    python -m prl.config.write [--check]

Above `MARK` a file is written by hand, and what it sets is left out below. `--check` writes nothing, and fails if a
file is not as it would be written.
"""

import ast
import functools
import inspect
import itertools
import math
import re
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from omegaconf import DictConfig, OmegaConf

from prl.config.evaluation import EvaluationConfig
from prl.config.schema import EnvConfig, ModelConfig, PolicyModelConfig, ServeConfig, TeacherConfig, TrainConfig
from prl.config.signature import OneOf, options_taken

MARK = "# --- what follows is the code's, by python -m prl.config.write; other values go above this line"
ALWAYS = ("monitor/jsonl", "monitor/console")
"""Monitors that every run has: they are no options."""
COMMANDS = {"train": TrainConfig, "serve": ServeConfig, "eval": EvaluationConfig}
OWN = {"train": {"sweep"}, "serve": set[str](), "eval": {"model"}}
"""Keys of a command that are named as a group is and filled by no option of it."""
WIDTH = 120


def pages() -> dict[Path, str]:
    """The files of all commands and options, by path, as they are to be."""
    from prl.config.compose import CONF, OF_TRAINER, options, schemas

    result = {path: schema for path, schema in schemas().items() if path not in ALWAYS}
    for group, schema in (("env", EnvConfig), ("model", ModelConfig), ("teacher", TeacherConfig)):
        result |= {f"{group}/{name}": schema for name in options()[group]}
    texts = {}
    for path, schema in result.items():
        file = CONF / f"{path}.yaml"
        texts[file] = page(file, path, schema, OF_TRAINER if path == "trainer/default" else ())
    for command, root in COMMANDS.items():
        groups = {*options(), "envs", "run"} - OWN[command]
        texts[CONF / f"{command}.yaml"] = page(CONF / f"{command}.yaml", command, root, groups)
    return texts


def page(file: Path, path: str, schema: Any, groups: Collection[str] = ()) -> str:
    """The text of a file. `path` is `<group>/<name>` for an option; `groups` are what other options fill."""
    group, _, name = path.partition("/")
    own = file.read_text(encoding="utf-8") if file.exists() else heading(group, name, schema)
    own = own.partition(MARK)[0].rstrip()
    given = {*groups, *(yaml.safe_load(own) or {})}
    fields = [lines for key, lines in fields_of(OmegaConf.structured(schema)) if key not in given]
    if path == "train":  # beside what the options of `model` set
        adapters = [lines for key, lines in fields_of(OmegaConf.structured(PolicyModelConfig), "  ") if key == "lora"]
        fields += ["model:", *adapters]
    if group == "sampling":  # an env's own follows the run's in all that it does not set
        fields = [textwrap.indent(lines, "# ") for lines in fields]
    return "\n".join([own, *(["", MARK] if fields else []), *fields]) + "\n"


def heading(group: str, name: str, schema: Any) -> str:
    """What stands above `MARK` in the file of an option that had none."""
    return f"# {first_line(described(schema))}\ndefaults:\n  - /schema/{group}@_here_: {name}\n  - _self_"


def fields_of(node: DictConfig, indent: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a node, each with its lines: what it is, and its default."""
    docs = docs_of_node(node)
    known = options_taken(described(OmegaConf.get_type(node))).annotations
    for name in map(str, node):
        child: Any = node._get_node(name)
        sentence = re.split(r"(?<=\.) (?=[A-Z`])", docs.get(name, ""))[0].rstrip(".")
        if isinstance(child, DictConfig) and not child._is_none() and len(child):
            if all(OmegaConf.is_interpolation(child, str(key)) for key in child):  # it follows another node
                continue
            below = [lines for _, lines in fields_of(child, f"{indent}  ")]
            yield name, "\n".join([*comment(sentence, "", indent), f"{indent}{name}:", *below])
        else:
            value = OmegaConf.to_container(child, resolve=False) if OmegaConf.is_config(child) else child._value()
            kind = type_of(known[name]) if name in known and not name.startswith("_") else ""
            yield name, "\n".join([*comment(sentence, kind, indent), f"{indent}{name}: {as_yaml(value)}"])


def comment(sentence: str, kind: str, indent: str) -> list[str]:
    """What a key is, in a line or more of comments; none where nothing is said of it."""
    message = f"{sentence} ({kind})" if sentence and kind else sentence or kind
    return [f"{indent}# {line}" for line in textwrap.wrap(message, WIDTH - len(indent) - 2, break_on_hyphens=False)]


def as_yaml(value: Any) -> str:
    """A value as it stands behind its key."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=math.inf)).removesuffix("...\n").strip()


def type_of(annotation: Any) -> str:
    """A type in words, with its bounds and choices."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        choices = [", ".join(each.choices) for each in args[1:] if isinstance(each, OneOf)]
        bounds = [
            f" {sign} {getattr(bound, at):g}"
            for bound in args[1:]
            for kind, at, sign in ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))
            if isinstance(bound, kind) and math.isfinite(getattr(bound, at))
        ]
        base, null, _ = type_of(args[0]).partition(" or null")
        return next(iter(choices), base + ",".join(bounds) + null)
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


def component(schema: Any) -> Any:
    """The class or function whose signature the schema was made from, if it is imported; else the schema itself."""
    instance = schema() if isinstance(schema, type) else schema
    module, _, name = str(getattr(instance, "_target_", "")).rpartition(".")
    cls = schema if isinstance(schema, type) else type(schema)
    return getattr(sys.modules.get(module), name, cls)


def described(schema: Any) -> Any:
    """What says most of a schema whatever has been imported: itself if somebody wrote it, else the class it is of."""
    cls = schema if isinstance(schema, type) else type(schema)
    return cls if first_line(cls) or docs_of(cls) else component(schema)


def first_line(described: Any) -> str:
    """The first sentence of a docstring; nothing where `dataclass` made one up."""
    text = inspect.getdoc(described) or ""
    return "" if text.startswith(f"{getattr(described, '__name__', '')}(") else text.split("\n\n")[0].replace("\n", " ")


def docs_of_node(cfg: DictConfig) -> dict[str, str]:
    """The docstrings under the keys of a node: its schema's, and those of the class that this was made from."""
    schema: Any = OmegaConf.get_type(cfg)
    return docs_of(component(schema)) | docs_of(schema)


@functools.cache
def docs_of(described: Any) -> dict[str, str]:
    """The docstrings under the fields of a class and of its base classes, by field."""
    result: dict[str, str] = {}
    for cls in reversed(inspect.getmro(described)) if inspect.isclass(described) else ():
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError, SyntaxError, ValueError):  # no source: made by make_dataclass, or built in
            continue
        result |= docs_in(tree)
    return result


def docs_in(tree: ast.AST) -> dict[str, str]:
    """The docstrings under the fields of a class's source, by field; nothing of what is no class."""
    return {
        ast.unparse(field.target): " ".join(str(doc.value.value).split())
        for field, doc in itertools.pairwise(tree.body if isinstance(tree, ast.ClassDef) else [])
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def main(arguments: list[str]) -> None:
    """Write the files that are not as they are to be, or with `--check` end with status 1 naming them."""
    stale = {
        path: text for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    if "--check" in arguments and stale:
        sys.exit("\n".join(f"{path} is out of date: python -m prl.config.write" for path in stale))
    for path, text in stale.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
