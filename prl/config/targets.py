"""What a config may name: the modules that a run imports because a key of its config says so.

Nothing of Python's standard library may be named, and no function of a library that prl itself uses. Of the rest, prl's
own and `torch.optim` are imported without a word; any other package is the user's, from the command line or a conf file
of theirs, and is said once on standard error before it is imported.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

from omegaconf import MISSING

from prl.errors import ConfigError
from prl.masking import HIDDEN
from prl.text import safe
from prl.user_code import OWN, contained

KEYS = ("_target_", "taskset", "import_path", "grader")
"""Keys whose values name code."""
INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))

_said: set[str] = set()
"""Packages that this process has said it imports."""


def named(node: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a plain config whose values name code, in any depth, and those values."""
    for key, value in entries(node):
        name = f"{where}.{key}".lstrip(".")
        if names_code(key, value):
            yield name, value
        else:
            yield from named(value, name)


def entries(node: Any) -> Iterable[tuple[Any, Any]]:
    """The keys and values of a mapping, the positions and values of a list; nothing of a scalar."""
    return node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()


def names_code(key: Any, value: Any) -> bool:
    """Whether a key of a config names code by this value."""
    if key not in KEYS or not isinstance(value, str) or value == MISSING or "${" in value:
        return False
    return key == "taskset" or any(sign in value for sign in ".:/")  # the graders `exact` and `numeric` are prl's


def refuse_masked(node: Any, where: str = "") -> None:
    """Raise ConfigError where a config has what a run's files have in place of a secret."""
    for key, value in entries(node):
        name = f"{where}.{key}".lstrip(".")
        if isinstance(value, str) and HIDDEN in value:
            raise ConfigError(
                f"{name} is {value!r}: no file of a run has its secrets. Give this one again on the command line, or "
                "'${oc.env:NAME}' for what the environment variable NAME holds"
            )
        refuse_masked(value, name)


def announce(node: Any) -> None:
    """Say in one line which packages of the user's a config has imported, before any is; refuse what may not be."""
    refuse_masked(node)
    may_import(*named(node))


def may_import(*paths: tuple[str, str]) -> None:
    """Say of which packages something is imported by these keys and paths, unless that has been said.

    Of one that is nowhere, the import says more. Raises ConfigError for a path of the standard library.
    """
    packages = {package_of(path, key) for key, path in paths if not path.startswith(OWN)}
    if new := sorted(filter(is_there, packages - _said - {"prl"})):
        _said.update(new)
        print(f"this config imports {safe(', '.join(new))}", file=sys.stderr, flush=True)


def package_of(path: str, key: str) -> str:
    """The package, or the file, that a dotted path, a verifiers id or `file.py:Name` is of.

    Raises ConfigError, which names `key`, for one of the standard library: its functions were not written to be named
    by a config, and some run what they are given.
    """
    place, _, _ = path.partition(":")
    if place.endswith(".py") or ("/" in place and ":" in path):
        return place
    package = place.rpartition("/")[2].partition("@")[0].split(".")[0]
    for name in (package, package.replace("-", "_").lower()):  # the second as verifiers reads an id
        if name in sys.stdlib_module_names:
            raise ConfigError(
                f"{key}={path!r}: nothing of {name} may be named, which comes with Python: name something of your own"
            )
    return package


def locate(target: str, where: str) -> Any:
    """The class or function that the dotted path `target` names; `where` is the config key, for messages."""
    module_path, _, name = target.rpartition(".")
    key = f"{where}._target_"
    if not all(target.split(".")) or not module_path:
        raise ConfigError(f"{key}={target!r}: give the dotted path of a class or function, e.g. my_pkg.Thing")
    may_import((key, target))
    with contained(f"{key}={target!r}", "importing it", target):
        try:
            module = importlib.import_module(module_path)
        except ImportError as error:
            raise ConfigError(f"{key}={target!r}: {error}; is the package installed?") from error
    if not hasattr(module, name):
        raise ConfigError(f"{key}={target!r}: module {module_path} has no {name!r}")
    return getattr(module, name)


def refuse_library(target: str, where: str) -> None:
    """Raise ConfigError where `target`, a function, is of a library that prl uses; nothing is imported to find out.

    A class is checked by its base class; of a function nothing but its signature could be, and some fetch code
    (`torch.hub.load`).
    """
    package = target.split(".")[0]
    if package != "prl" and is_installed(package) and package in libraries():
        raise ConfigError(
            f"{where}._target_={target!r}: {package} is a library that prl uses: write a function of your own"
        )


def is_there(package: str) -> bool:
    """Whether a package, or a file, can be imported."""
    if package in sys.modules or "/" in package or package.endswith(".py"):
        return True
    return any(spec_of(name) is not None for name in (package, package.replace("-", "_").lower()))


def is_installed(package: str) -> bool:
    """Whether a package lies where packages are installed, rather than in a folder of the user's."""
    spec = spec_of(package)
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(place.startswith(INSTALLED) for place in places)


def spec_of(package: str) -> ModuleSpec | None:
    """Where a top-level package is; None where there is none. Nothing is imported."""
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: of __main__ nothing is known, or the name is none
        return None


@functools.cache
def libraries() -> frozenset[str]:
    """The top-level modules of what prl asks for, of what that asks for, and so on."""
    found: set[str] = set()
    waiting = ["prl"]
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            asked = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        waiting += [each for each in asked if name == "prl" or "extra ==" not in each]
    provided = importlib.metadata.packages_distributions().items()
    return frozenset(module for module, names in provided if found & set(map(_normal, names)))


def _normal(requirement: str) -> str:
    """The name of a distribution, as all spellings of it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()
