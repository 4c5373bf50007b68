"""Packages of which a process imports what it uses: names are looked up when they are asked for.

verifiers and vLLM use a dozen classes of openai's and anthropic's, whose packages import all of their 3,700 modules at
once: seconds of each process's start. A package listed here is not executed. Asked for a name that its `__init__`
imports from one of its modules, it imports that module, and likewise one of its modules; asked for anything else, it is
executed after all and is as it always is. Standard library only.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = {"openai", "anthropic", "prime_sandboxes"}
"""Packages, and below, those named `types`, that import names from their own modules and do little else."""
FUNCTIONS = {
    "math_verify": ("parse", "verify"),  # imports sympy and a parser of LaTeX; for envs that verify mathematics
    "transformers.modeling_gguf_pytorch_utils": ("load_gguf_checkpoint",),  # imports torch; for tokenizers from GGUF
    "scipy.optimize": ("linear_sum_assignment",),  # transformers, for models that find objects
    "torch.utils.cpp_extension": ("load_inline",),  # imports setuptools; vLLM, for several GPUs
    "httpx._main": ("main",),  # imports rich; httpx, for its command
    "scipy.signal": (),  # vLLM, for models that listen
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter": ("OTLPSpanExporter",),  # vLLM, where it is asked to trace
    "opentelemetry.exporter.otlp.proto.http.trace_exporter": ("OTLPSpanExporter",),
}
"""Modules that others import for some functions, which import the module when they are called.

So does any other name of theirs.
"""

_executing = threading.RLock()


class LazyLoader(importlib.abc.Loader):
    """Makes a module that imports names as they are asked for; `whole` executes it."""

    def __init__(self, whole: importlib.abc.InspectLoader):
        self.whole = whole

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.whole.create_module(spec)

    def get_source(self, name: str) -> str | None:
        """The module's source, for those who show it."""
        return self.whole.get_source(name)

    def is_package(self, name: str) -> bool:
        """Whether the module has modules below it."""
        return self.whole.is_package(name)

    def exec_module(self, module: ModuleType) -> None:
        names = self.names(module)

        def look_up(name: str) -> Any:
            if name in names:
                try:
                    value = imported(*names[name])
                except ImportError:  # it needs what the package defines itself
                    self.execute(module)
                    value = vars(module)[name]
            elif name.startswith("__") and name != "__all__":
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            elif hasattr(module, "__path__") and importlib.util.find_spec(f"{module.__name__}.{name}"):
                value = importlib.import_module(f"{module.__name__}.{name}")
            else:
                self.execute(module)
                if name not in vars(module):
                    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
                value = vars(module)[name]
            setattr(module, name, value)
            return value

        for name in FUNCTIONS.get(module.__name__, ()):
            setattr(module, name, self.function(module, name))
        module.__getattr__ = look_up  # type: ignore[method-assign]

    def names(self, module: ModuleType) -> dict[str, tuple[str, str | None]]:
        """The names that a package imports from its own modules: of each the module, and its name there (None: it)."""
        found: dict[str, tuple[str, str | None]] = {}
        tree = ast.parse("" if module.__name__ in FUNCTIONS else self.get_source(module.__name__) or "")
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                for each in node.names:
                    if node.module is None:
                        found[each.asname or each.name] = f"{module.__name__}.{each.name}", None
                    elif each.name != "*":
                        found[each.asname or each.name] = f"{module.__name__}.{node.module}", each.name
        return found

    def function(self, module: ModuleType, name: str) -> Any:
        """What stands for a function of the module until the module is executed."""

        def call(*args: Any, **options: Any) -> Any:
            self.execute(module)
            return getattr(module, name)(*args, **options)

        call.__name__ = call.__qualname__ = name
        return call

    def execute(self, module: ModuleType) -> None:
        """Have the module be as it would be without this loader, once."""
        with _executing:
            look_up = vars(module).pop("__getattr__", None)
            if look_up is None:
                return
            try:
                self.whole.exec_module(module)
            except BaseException:
                module.__getattr__ = look_up  # type: ignore[method-assign]
                raise


def imported(module: str, name: str | None) -> Any:
    """What `from module import name` gives; the module itself without a name."""
    found = importlib.import_module(module)
    if name is None:
        return found
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


class LazyFinder(importlib.abc.MetaPathFinder):
    """Finds the modules that are loaded lazily."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, *below = name.split(".")
        if name not in FUNCTIONS and not (top in PACKAGES and (not below or below[0] == "types")):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        if name not in FUNCTIONS and spec.submodule_search_locations is None:
            return None
        spec.loader = LazyLoader(spec.loader)
        return spec


def install() -> None:
    """Have this process load them lazily; those that it has imported already stay as they are."""
    if not any(isinstance(finder, LazyFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, LazyFinder())
