"""The `--help` of the commands that Hydra configures: groups with their options, keys with what they mean.

Whatever is said of an option or a key stands in the code: the first line of a class's docstring, the docstring under a
field, the first comment of a conf file.
"""

import ast
import functools
import importlib.util
import inspect
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from prl.compose import CONF, OF_TRAINER, allow_new_filters, options, schemas
from prl.config.evaluation import NOT_OF_A_CHAT
from prl.config.instantiate import nearest
from prl.errors import ConfigError

USAGE = """usage: prl {root}{targets} [group=option …] [key=value …]      (python -m prl.{root} is the same)

Arguments are overrides of the config: group=option chooses one of a group, key=value sets a key, +key=value adds one
that is not there yet, ~key removes one. Hydra's own flags are in --hydra-help.

  prl {root} --cfg job --resolve      every key with its value
  prl {root} --help {group:<10}        the keys of a group's option, of a node or of one key, explained
  prl {root} --help {option:<10}        the same with another option
"""
TARGETS = {name: f" <checkpoint | run | model | endpoint>{more}" for name, more in (("eval", " …"), ("chat", ""))}
AGAIN = """  prl train --from <run> [key=value …]    a run's config again; --trust where it names code that is not prl's
  prl train -m seed=0,1,2                a run for each value
"""
MANY = 12
"""Options of a group beyond this many are listed by name alone."""


def root_of(name: str) -> str:
    """The file in `conf/` that the command `name` composes."""
    return "eval" if name == "chat" else name


def page(name: str, arguments: list[str]) -> str:
    """What `--help` of a command says: all groups and the top level, or of each argument that names a group or a key.

    Raises ConfigError for an argument that names nothing.
    """
    root = root_of(name)
    if root == "eval":  # words before the flag are what is evaluated
        flag = next(at for at, argument in enumerate(arguments) if argument.startswith("-"))
        arguments = [*(argument for argument in arguments[:flag] if "=" in argument), *arguments[flag:]]
    overrides = [argument for argument in arguments if "=" in argument]
    asked = [argument.split("=", 1)[0].lstrip("+") for argument in arguments if not argument.startswith("-")]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose(root, allow_new_filters(overrides))
    if asked:
        return "\n".join("\n".join(of_key(cfg, key.split("@")[-1])) for key in asked)
    group = "algo" if root == "train" else "inference"
    usage = USAGE.format(root=name, targets=TARGETS.get(name, ""), group=group, option=f"{group}=…")
    lines = [usage + AGAIN * (root == "train"), "Groups, and their options:", ""]
    for group in groups_of(name, cfg):
        lines += of_group(group)
    lines += ["", "Keys of the top level:", ""]
    return "\n".join([*lines, *(line for key in keys_of(name, cfg) for line in leaf(cfg, key, key))])


def keys_of(name: str, cfg: DictConfig) -> list[str]:
    """The keys of the top level that the command `name` reads."""
    return [key for key in map(str, cfg) if name != "chat" or key not in NOT_OF_A_CHAT]


def groups_of(name: str, cfg: DictConfig) -> list[str]:
    """The groups of which the command `name` takes an option."""
    named = {
        *keys_of(name, cfg),
        *{"train": ["env", "experiment", "debug", *OF_TRAINER], "eval": ["env"]}.get(name, []),
    }
    if root_of(name) == "eval":
        named.remove("model")  # there it is the settings of all targets
    return [group for group in options() if group in named]


def of_group(group: str) -> Iterator[str]:
    """A group's options, each with what is said of it."""
    names = options()[group]
    if len(names) > MANY:
        yield from paragraph(group, ", ".join(names))
        return
    yield f"  {group}"
    for name in names:
        yield from paragraph(f"  {name}", said_of_option(group, name))


def said_of_option(group: str, name: str) -> str:
    """The first docstring line of an option's class, else the first comment of its conf file."""
    schema = schemas().get(f"{group}/{name}")
    told = first_line(described(schema)) if schema is not None else ""
    path = CONF / group / f"{name}.yaml"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    comments = [line[1:].strip() for line in lines if line.startswith("#")]
    comments = [line for line in comments if not line.startswith(("@package", "python -m", "prl "))]
    return told or next(iter(comments), "")


def of_key(cfg: DictConfig, key: str) -> Iterator[str]:
    """A node's keys with their docs, or one key's; of a group, its options first."""
    node, _, name = key.rpartition(".")
    parent = OmegaConf.select(cfg, node) if node else cfg
    if key in options():
        yield from of_group(key)
        yield ""
    if key in ("env", "experiment", "debug", "filter"):
        return
    if not isinstance(parent, DictConfig) or name not in parent:
        known = {*(map(str, parent) if isinstance(parent, DictConfig) else ()), *(() if node else options())}
        raise ConfigError(f"--help {key}: there is no such key or group; {nearest(key, known, 'there are')}")
    child = parent._get_node(name)
    if isinstance(child, DictConfig) and not child._is_none():
        yield from of_node(child, f"{key}.")
    else:
        yield from leaf(parent, name, key)


def of_node(cfg: DictConfig, prefix: str) -> Iterator[str]:
    """The keys of a node, and those of the nodes in it."""
    for name in map(str, cfg):
        child = cfg._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and len(child) and name != "_target_":
            yield from of_node(child, f"{prefix}{name}.")
        else:
            yield from leaf(cfg, name, f"{prefix}{name}")


def leaf(cfg: DictConfig, name: str, key: str) -> Iterator[str]:
    """One key with its value and its doc."""
    child: Any = cfg._get_node(name)
    value = "…" if isinstance(child, DictConfig) and not child._is_none() else child._value()
    shown = {None: "null", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value
    docs = docs_of_node(cfg)
    env = cfg._get_parent()
    if cfg._key() in ("args", "eval_args") and isinstance(env, DictConfig) and "taskset" in env:
        taskset: Any = env._get_node("taskset")
        docs = docs_of_taskset(str(taskset._value()))
    group = f"a group: --help {key}" if key in options() else ""
    yield from paragraph(f"{key}={'' if value == '…' else shown}".removesuffix("="), docs.get(name, group))


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
    found: dict[str, str] = {}
    for cls in reversed(inspect.getmro(described)) if inspect.isclass(described) else ():
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError, SyntaxError, ValueError):  # no source: made by make_dataclass, or built in
            continue
        found |= docs_in(tree)
    return found


def docs_in(tree: ast.AST) -> dict[str, str]:
    """The docstrings under the fields of a class's source, by field; nothing of what is no class."""
    return {
        ast.unparse(field.target): " ".join(str(doc.value.value).split())
        for field, doc in itertools.pairwise(tree.body if isinstance(tree, ast.ClassDef) else [])
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


@functools.cache
def docs_of_taskset(module: str) -> dict[str, str]:
    """The docstrings under the settings of a taskset, by name: in its module's classes `…Config`, and in those of prl's
    that they extend. The source is read, since the import of a taskset takes seconds."""
    try:
        spec = importlib.util.find_spec(module)
        tree = ast.parse(Path(spec.origin or "").read_bytes()) if spec is not None else ast.Module([], [])
    except Exception:  # no such module, no source, or the package around it, which is user code, fails
        return {}
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(each.name.endswith("Config") for each in node.names):
            found |= docs_of_taskset(str(node.module)) if str(node.module).startswith("prl.envs.") else {}
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            found |= docs_in(node)
    return found


def paragraph(head: str, text: str) -> list[str]:
    """`head` and `text` beside it, wrapped to the terminal; below it where the head is long."""
    width, indent = min(shutil.get_terminal_size((120, 24)).columns, 120), 30
    wrapped = textwrap.wrap(text, width - indent, break_on_hyphens=False) or [""]
    first = f"  {head}".ljust(indent)
    if len(head) + 3 > indent:
        return [first, *(" " * indent + line for line in wrapped if line)]
    return [(first + wrapped[0]).rstrip(), *(" " * indent + line for line in wrapped[1:])]
