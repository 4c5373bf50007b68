"""torch's compiler, imported when something is compiled: more than half a second of a process that compiles nothing.

torch imports its packages `torch._dynamo` and `torch._inductor` itself when `torch.compile` is called. But transformers
and vLLM decorate functions for them as they are imported, and torch's optimisers ask for them as they are made. Here
the two are not executed until one of their modules or any other name of theirs is asked for. What was decorated before
is decorated then. Written for torch 2.13. Standard library only.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from prl.lazy_imports import LazyLoader

DYNAMO = "torch._dynamo"
PACKAGES = (DYNAMO, "torch._inductor")
ALONE = {
    "torch._dynamo.config",  # torch, where it runs a layer once more for its gradient
    "torch._dynamo._trace_wrapped_higher_order_op",  # transformers, for one class
    "torch._inductor.custom_graph_pass",  # vLLM's config, for one class
}
"""Modules that do without their package, and who imports them."""
MARKING = ("allow_in_graph", "assume_constant_result")
"""Decorators that leave the function as it is, and note it for the compiler."""
STAND_INS = (*MARKING, "disable", "graph_break", "trace_rules", "decorators")
"""Names of `torch._dynamo` that have something in their place until it is executed."""


class CompilerLoader(LazyLoader):
    """Makes a package of the compiler that is executed when it is used."""

    def __init__(self, whole: importlib.abc.InspectLoader):
        super().__init__(whole)
        self.marked: list[tuple[str, Any]] = []
        """What was decorated before the package was executed, and with which of `MARKING`."""

    def names(self, module: ModuleType) -> dict[str, tuple[str, str | None]]:
        return {}

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ != DYNAMO:
            return
        for name in MARKING:
            setattr(module, name, functools.partial(self.mark, name))
        vars(module).update(
            disable=functools.partial(self.disable, module),
            graph_break=lambda *args, **named: None,  # an optimiser's, in each step
            trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),  # where a process group is made
        )
        if os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # vLLM marks what it samples from for what is not compiled
            vars(module)["decorators"] = SimpleNamespace(mark_unbacked=lambda *args, **named: None)

    def mark(self, name: str, function: Any) -> Any:
        """Note a decorated function."""
        self.marked.append((name, function))
        return function

    def disable(
        self, module: ModuleType, function: Any = None, recursive: bool = True, *, wrapping: bool = True, **options: Any
    ) -> Any:
        """What `torch._dynamo.disable` returns: without a compiler there is nothing to keep from the function."""
        if function is None:
            return functools.partial(self.disable, module, recursive=recursive, wrapping=wrapping, **options)
        if isinstance(function, type) or not callable(function):
            self.execute(module)
            return module.disable(function, recursive, wrapping=wrapping, **options)
        disabled: list[Callable[..., Any]] = []

        def direct(*args: Any, **named: Any) -> Any:
            if is_light(module):
                return function(*args, **named)
            if not disabled:
                disabled.append(module.disable(function, recursive, wrapping=wrapping, **options))
            return disabled[0](*args, **named)

        if wrapping:
            functools.update_wrapper(direct, function)
        vars(direct).update(_torchdynamo_disable=True, _torchdynamo_orig_callable=function)
        return direct

    def execute(self, module: ModuleType) -> None:
        if not is_light(module):
            return
        light = {name: vars(module).pop(name) for name in STAND_INS if name in vars(module)}
        try:
            super().execute(module)
        except BaseException:
            vars(module).update(light)
            raise
        while self.marked:
            name, function = self.marked.pop(0)
            getattr(module, name)(function)


def is_light(module: ModuleType) -> bool:
    """Whether a module is one of a `CompilerLoader`'s that has not been executed."""
    loader = getattr(module.__spec__, "loader", None)
    return isinstance(loader, CompilerLoader) and "look_up" in getattr(vars(module).get("__getattr__"), "__name__", "")


class Found(importlib.abc.Loader):
    """Gives the module that its package has imported meanwhile, and leaves its spec as it was.

    It takes the place of the spec's loader: importlib prefers the spec of a module that is there to any other, and
    would execute the module once more.
    """

    def __init__(self, module: ModuleType, spec: ModuleSpec):
        self.module, self.whole = module, spec.loader
        spec.loader = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)  # where nobody imports what has been found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.whole


class CompilerFinder(importlib.abc.MetaPathFinder):
    """Finds the packages of the compiler, and has one executed before a module of it is imported, as Python does."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in PACKAGES:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                spec.loader = CompilerLoader(spec.loader)
            return spec
        package = next((package for package in PACKAGES if name.startswith(f"{package}.")), None)
        module = None if package is None or name in ALONE else sys.modules.get(package)
        if module is None or not is_light(module):
            return None
        module.__spec__.loader.execute(module)  # type: ignore[union-attr]
        found = sys.modules.get(name)
        spec = None if found is None else found.__spec__
        if found is not None and spec is not None:
            Found(found, spec)
        return spec


def install() -> None:
    """Have this process import the compiler when it compiles, unless it has imported it already."""
    if not any(isinstance(finder, CompilerFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CompilerFinder())


def check_plainly() -> None:
    """Have torch check plain values without what it has for symbolic ones, which imports sympy."""
    import torch

    check = torch._check_with

    def check_with(error_type: Any, cond: Any, message: Any) -> None:
        if cond is not True:
            check(error_type, cond, message)

    if check.__name__ != check_with.__name__:
        torch._check_with = check_with
