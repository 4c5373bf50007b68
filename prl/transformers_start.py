"""The import of transformers, where it finds out anew what it has found out in earlier processes.

transformers reads the files of all its models, twice, to learn which names they have, and lists the files of every
package that is installed: half a second. Both are remembered here for as long as those files stay as they are.
Written for transformers 5.17. Standard library only until transformers is imported.
"""

import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

UTILITIES = "transformers.utils.import_utils"
METADATA = (".dist-info", ".egg-info")
"""How the names of folders and files end in which a package says what it has installed."""
Structure = list[tuple[list[str], dict[str, list[str]]]]
"""Names by module, by the packages that the modules need."""
packages_distributions = importlib.metadata.packages_distributions


class UtilitiesLoader(importlib.abc.Loader):
    """Executes transformers' module of imports, and has it remember what takes it long."""

    def __init__(self, whole: importlib.machinery.SourceFileLoader):
        self.whole = whole

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.whole.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.whole
        importlib.metadata.packages_distributions = installed
        try:
            self.whole.exec_module(module)
        finally:
            importlib.metadata.packages_distributions = packages_distributions
        if define := vars(module).get("define_import_structure"):
            vars(module)["define_import_structure"] = functools.partial(structure, module, define)


class UtilitiesFinder(importlib.abc.MetaPathFinder):
    """Finds transformers' module of imports."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == UTILITIES else None
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = UtilitiesLoader(spec.loader)
        return spec


def install() -> None:
    """Have transformers, once it is imported, ask what is remembered."""
    if not any(isinstance(finder, UtilitiesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, UtilitiesFinder())


def without_sharding() -> None:
    """Have transformers, in a process that shards no model over others, do without torch's sharded tensors.

    It imports them, and sympy for them, to ask of each weight whether it is one.
    """
    import torch.distributed
    from transformers.utils import import_utils

    now = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        import_utils.is_torch_distributed_available()  # it asks once
    finally:
        torch.distributed.is_available = now


def installed() -> Mapping[str, list[str]]:
    """What `importlib.metadata.packages_distributions` returns: packages by the name that is imported."""
    from prl.remembered import remembered

    if [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")] != [PathFinder]:
        return packages_distributions()
    parts = [part for entry in sys.path for part in metadata_in(entry or ".")]
    return remembered([__name__.encode(), *parts], lambda: dict(packages_distributions()), dict[str, list[str]])


def metadata_in(entry: str) -> Iterator[bytes]:
    """What tells whether other packages are installed in a folder, or an archive, that modules are imported from."""
    if os.path.isfile(entry):
        yield f"{entry} {os.stat(entry).st_mtime_ns}".encode()
    elif os.path.isdir(entry):
        with os.scandir(entry) as found:
            said = sorted(f"{each.name} {each.stat().st_mtime_ns}" for each in found if each.name.endswith(METADATA))
        if said:
            yield "\n".join([entry, *said]).encode()


def structure(module: ModuleType, define: Any, path: str | Path, prefix: str | None = None) -> Any:
    """What transformers' `define_import_structure` returns, asked of the folder of all its models from memory."""
    from prl.remembered import remembered

    assert module.__file__ is not None
    folder = Path(path).parent if os.path.isfile(path) else Path(path)
    if folder != Path(module.__file__).parents[1] / "models":
        return define(path, prefix)

    def found() -> Structure:
        return [
            (sorted(needed), {name: sorted(names) for name, names in modules.items()})
            for needed, modules in define(path).items()
        ]

    before = "" if prefix is None else f"{prefix}."
    known = remembered([__name__.encode(), *files_of(module.__file__, folder)], found, Structure)
    return {
        frozenset(needed): {before + name: set(names) for name, names in modules.items()} for needed, modules in known
    }


@functools.cache
def files_of(file: str, folder: Path) -> list[bytes]:
    """What tells whether `file`, or a file below a folder, has changed: a digest of names, sizes and times."""
    digest, below = hashlib.sha256(f"{file} {os.stat(file).st_mtime_ns}\n".encode()), [str(folder)]
    while below:
        with os.scandir(below.pop()) as entries:
            found = sorted((each for each in entries if each.name != "__pycache__"), key=lambda each: each.name)
        for each in found:
            if each.is_dir():
                below.append(each.path)
            else:
                state = each.stat()
                digest.update(f"{each.path} {state.st_size} {state.st_mtime_ns}\n".encode())
    return [digest.digest()]
