"""The shape that prl/README.md promises: imports point one way, sizes, one home for each private touch of a library."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import prl

PACKAGE = Path(prl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
FLOORS = [
    {
        "errors",
        "lazy_compiler",
        "lazy_imports",
        "masking",
        "remembered",
        "signals",
        "standby",
        "tensor_names",
        "terminal",
        "text",
        "transformers_start",
        "user_code",
    },
    {"wire", "config", "models"},
    {"inference", "trainer"},
    {"engines"},
    {"rollouts"},
    {"monitors"},
    {"episodes", "envs"},
    {"orchestrator"},
    {"launch", "viewer"},
    {"dry_run"},
    {"compose", "provenance", "resume", "log"} | {"owner", "result", "run_dir", "run_yaml"},
    {"report"},
    {"evaluation"},
    {"command", "train", "serve", "env", "eval", "chat", "sweep"},
    {"__main__"},
]
"""From the ground up. A package imports only packages on its own floor or below."""
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def is_python(path: Path) -> bool:
    return path.suffix == ".py" or (not path.suffix and path.read_bytes()[:80].split(b"\n")[0].endswith(b"python"))


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path):
    """The modules of prl that a file imports, at the top or in a function; not those for the type checker alone."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "prl":
            module = node.module.split(".")
            yield from [module[1]] if len(module) > 1 else [name.name for name in node.names]
        elif isinstance(node, ast.Import):
            yield from [name.name.split(".")[1] for name in node.names if name.name.startswith("prl.")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_downwards(path):
    package = package_of(path)
    # verifiers looks our harness up by the name of a top-level module; the other is a command beside what it is about.
    if package == "__init__" or path == PACKAGE / "config" / "write.py":
        return
    above = {name for name in imports(path) if FLOOR[name] > FLOOR[package]}
    assert not above, f"{package} (floor {FLOOR[package]}) imports {above}"


def test_the_orchestrator_and_the_trainer_share_configs_and_the_wire_alone():
    for ours, theirs in (("orchestrator", "trainer"), ("trainer", "orchestrator")):
        for path in (PACKAGE / ours).rglob("*.py"):
            assert theirs not in set(imports(path)), path


def test_every_package_has_a_floor():
    assert {package_of(path) for path in FILES} - {"__init__"} == set(FLOOR)


def cycles(graph: dict[str, set[str]]) -> set[str]:
    """The modules that reach themselves."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            if (module := waiting.pop()) not in found:
                found.add(module)
                waiting += graph.get(module, ())
        return found

    return {module for module in graph if module in reached(module)}


def test_no_module_imports_itself_by_way_of_others():
    names = {"prl." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prl")]
        found = {node.module for node in top} | {f"{node.module}.{alias.name}" for node in top for alias in node.names}
        graph[name] = found & set(names)
    assert cycles(graph) == set()


@pytest.mark.parametrize(
    ("library", "private", "home"),
    [
        ("verifiers", r"_episode_agents|\._agents\b|_call_state|invoke_all\b.*=", "episodes/_verifiers_internals.py"),
        ("vllm", r"SpinCondition|dispatch_cpu_unquantized_gemm", "inference/worker.py"),
        ("renderers", r"\._tokenizer\b|\"_tokenizer\"", "inference/renderer.py"),
    ],
)
def test_what_a_library_keeps_private_is_touched_in_one_file(library, private, home):
    touching = {path.relative_to(PACKAGE).as_posix() for path in FILES if re.search(private, path.read_text())}
    assert touching <= {home}, f"private parts of {library}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 50, f"{node.name} in line {node.lineno}"


ASCII = {"run_dir.py", "config/machine.py"}
"""Locks and numbers."""


def is_text_of_the_locale(call: ast.Call) -> bool:
    """Whether a call reads or writes text in whatever encoding the machine has."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    told = any(keyword.arg in ("encoding", None) for keyword in call.keywords)
    if name in ("read_text", "write_text"):
        return not told
    modes = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    binary = any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes)
    return name in ("open", "LogFile") and not (told or binary or ast.unparse(call.func) == "os.open")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_text_is_utf8_whatever_the_locale(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    lines = [node.lineno for node in calls if is_text_of_the_locale(node)]
    assert not lines or path.relative_to(PACKAGE).as_posix() in ASCII, f"without encoding=: lines {lines}"


SCRIPTS = [path for path in (PACKAGE.parent / "scripts").rglob("*") if path.is_file() and is_python(path)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_of_prl_is_there(path):
    """No test runs the benchmarks: they take minutes, and an engine."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "prl":
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}"), name.name
