"""Data never becomes code: a walk over the tree for whatever unpickles, evaluates or hands a string to a shell."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("prl", "scripts", "tests", "conf", "experiments", ".ci")
MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve",
    "copyreg", "code", "codeop", "runpy",
}  # fmt: skip
"""Modules that turn data into objects, or texts into running code."""
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell", "torch.load", "torch.hub.load", "torch.jit.load", "numpy.load",
    "np.load", "pandas.read_pickle", "pd.read_pickle", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
    "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader", "logging.config.listen",
}  # fmt: skip
OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"}
"""Collectives of torch's that pickle."""
ATTRIBUTES = OBJECTS | {call.rpartition(".")[2] for call in CALLS}
FLAGS = {"shell": True, "allow_pickle": True, "weights_only": False, "trust_remote_code": True}
"""Arguments that open a door, where they are written out."""

ARGUED = {
    ("prl/__main__.py", "runpy"): "runs a command of prl's, whose names are written there",
    ("prl/envs/grading.py", "pickle"): "what a run hands to its own workers, as multiprocessing does; no file, no port",
    ("prl/envs/workers.py", "pickle"): "the same",
    ("prl/envs/ray_workers.py", "pickle"): "the same, through Ray, which pickles calls as well",
    ("prl/envs/sandboxed.py", "compile"): "the code of replies, in a process that has given up its rights",
    ("prl/envs/sandboxed.py", "exec"): "the same",
    ("prl/envs/sandboxed.py", "eval"): "the tests of that code",
    ("prl/envs/tasksets/code.py", "compile"): "finds errors in the tests of a data file; what it makes is thrown away",
    ("tests/support/misdeeds.py", "os.system"): "a grader that does what it should not",
    ("tests/support/engines.py", "exec"): "a command in a process that has imported what takes seconds",
    ("tests/support/quick_compose.py", "pickle"): "copies what the process itself has composed, and writes nothing",
    ("tests/e2e/test_readme.py", "compile"): "the blocks of the README, as a reader would run them",
    ("tests/e2e/test_readme.py", "exec"): "the same",
    ("tests/e2e/test_sources.py", "eval"): "the arithmetic of tasks that the env draws, to answer them",
    ("tests/envs/tasksets/test_code_blocks.py", "exec"): "replies that the test has written",
    ("tests/test_hostile_text.py", "compile"): "the patterns that stand in prl's own sources",
    ("tests/test_hostile_text.py", "eval"): "the same",
    ("tests/tinker/test_page.py", "compile"): "the loop of the page, as a reader would run it",
    ("tests/tinker/test_page.py", "exec"): "the same",
    ("tests/tinker/test_page.py", "compile"): "the loop of the page, as a reader would run it",
    ("tests/tinker/test_page.py", "exec"): "the same",
    ("tests/trainer/test_model.py", "trust_remote_code=True"): "a model whose code the test has written",
    ("tests/envs/tasksets/test_math.py", "eval"): "the arithmetic of a task that the test has drawn",
}
"""What there is all the same, and why."""


def files() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in found if path.suffix == ".py" or is_script(path))


def is_script(path: Path) -> bool:
    return not path.suffix and b"python" in path.read_bytes()[:80].split(b"\n")[0]


def doors(text: str) -> set[str]:
    """What in a Python source could turn data into code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.split(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{name.name}" for name in node.names}
            found |= {node.module for _ in "1" if (node.module or "").split(".")[0] in MODULES} | full & CALLS
            found |= {name.name for name in node.names} & OBJECTS
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in BUILTINS:
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            found |= {ast.unparse(node)} & CALLS | {node.attr} & OBJECTS
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            found |= {f"{node.arg}={node.value.value}"} & {f"{name}={value}" for name, value in FLAGS.items()}
    return found


DOORS = [
    ("import pickle as p", "pickle"),
    ("from cloudpickle import loads", "cloudpickle"),
    ("import torch\ntorch.load('x')", "torch.load"),
    ("from torch import load", "torch.load"),
    ("getattr(exec, '__call__')('1')", "exec"),
    ("subprocess.run('ls', shell=True)", "shell=True"),
    ("import os\nrun = os.system", "os.system"),
    ("dist.all_gather_object(a, b)", "all_gather_object"),
    ("from torch.distributed import gather_object", "gather_object"),
    ("AutoModel.from_pretrained(p, trust_remote_code=True)", "trust_remote_code=True"),
]


@pytest.mark.parametrize(("source", "door"), DOORS)
def test_the_walk_sees_every_door(source, door):
    assert door in doors(source)


def test_the_walk_leaves_what_is_harmless():
    harmless = "model.eval()\nre.compile('x')\nyaml.safe_load(t)\njson.load(f)\nsubprocess.run(['ls'], shell=False)\n"
    assert doors(harmless) == set()


def test_no_data_becomes_code():
    paths = files()
    assert len(paths) > 250 and {ROOT / "prl" / "train.py", ROOT / "scripts" / "bench_step"} <= set(paths)
    found = {(path.relative_to(ROOT).as_posix(), door) for path in paths for door in doors(path.read_text())}
    assert found == set(ARGUED), "nothing of these without a reason in ARGUED, and no reason without them"
