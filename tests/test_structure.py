"""The shape that prl/README.md promises: where imports point, and what is touched in one file alone."""

import ast
import functools
import graphlib
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import prl

PACKAGE = Path(prl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
FLOORS = 9
"""At most so many packages stand one above the other."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in FILES}


def package_of(name: str) -> str:
    """The package of a file, or the module at the root."""
    return name.split("/")[0].removesuffix(".py")


def imported_packages(tree: ast.Module) -> set[str]:
    """Return the packages of prl that a file imports: at the top, in a function, for the type checker."""
    packages = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "prl":
            packages |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prl."):
            packages.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("prl.")}
    return packages


@functools.cache
def arrows() -> dict[str, set[str]]:
    """The packages that each package imports, itself left out."""
    found: dict[str, set[str]] = {package_of(name): set() for name in trees()}
    for name, tree in trees().items():
        found[package_of(name)] |= imported_packages(tree) - {package_of(name)}
    return found


def test_no_package_imports_itself_by_way_of_others():
    order = list(graphlib.TopologicalSorter(arrows()).static_order())  # raises CycleError with the packages of a cycle
    floors: dict[str, int] = {}
    for package in order:
        floors[package] = 1 + max((floors[below] for below in arrows()[package]), default=0)
    assert max(floors.values()) <= FLOORS


def test_the_ground_imports_nobody():
    assert not arrows()["base"]


def test_orchestrator_and_trainer_do_not_know_each_other():
    assert "trainer" not in arrows()["orchestrator"] and "orchestrator" not in arrows()["trainer"]
    assert not arrows()["engines"] & {"orchestrator", "trainer"}


def test_no_module_imports_itself_by_way_of_others():
    modules = {"prl." + name.removesuffix(".py").replace("/", "."): tree for name, tree in trees().items()}
    graph = {}
    for module, tree in modules.items():
        top = [node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prl")]
        names = {node.module for node in top} | {f"{node.module}.{alias.name}" for node in top for alias in node.names}
        graph[module] = names & set(modules)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a cycle


@pytest.mark.parametrize(
    ("private", "home"),
    [
        (r"_episode_agents|\._agents\b|_call_state|invoke_all\b.*=", "envs/_verifiers_internals.py"),
        (r"SpinCondition|dispatch_cpu_unquantized_gemm", "engines/vllm/worker.py"),
        (r"\._tokenizer\b|\"_tokenizer\"", "engines/renderer.py"),
    ],
)
def test_private_parts_of_a_library_stay_in_one_file(private, home):
    touching = {path.relative_to(PACKAGE).as_posix() for path in FILES if re.search(private, path.read_text())}
    assert touching <= {home}


def test_functions_fit_a_screen():
    long = [
        f"{name}, line {node.lineno}: {node.name}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 50
    ]
    assert not long


ASCII = {"runs/run_dir.py", "config/hardware.py"}
"""Read locks and numbers, in any encoding."""


def is_text_of_the_locale(call: ast.Call) -> bool:
    """Whether a call reads or writes text in whatever encoding the machine has."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    modes = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    binary = any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes)
    opens = name == "open" and ast.unparse(call.func) not in ("os.open", "Image.open") and not binary
    has_encoding = any(keyword.arg in ("encoding", None) for keyword in call.keywords)
    return (opens or name in ("read_text", "write_text")) and not has_encoding


def test_text_is_utf8_whatever_the_locale():
    lines = [
        f"{name}, line {node.lineno}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and name not in ASCII and is_text_of_the_locale(node)
    ]
    assert not lines, "without encoding="


SCRIPTS = [path for path in sorted((PACKAGE.parent / "scripts").iterdir()) if path.is_file()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_of_prl_is_there(path):
    """No test runs the benchmarks: they take minutes, and an engine."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text if text.split("\n")[0].endswith("python") else "")):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prl"):
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}"), name.name
