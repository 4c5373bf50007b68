"""torch's compiler: not executed by what compiles nothing, and as it always is once something is compiled."""

import json
import subprocess
import sys

import pytest

from tests.test_lazy_imports import in_python

LIGHT = """
import prl, json, os, sys
from prl import lazy_compiler
lazy_compiler.install()
lazy_compiler.install()
import torch, torch._dynamo, torch._inductor
torch.set_num_threads(1)
def light(): return [lazy_compiler.is_light(sys.modules[name]) for name in lazy_compiler.PACKAGES]
for line in sys.stdin:
    code, said = json.loads(line)
    if (child := os.fork()) == 0:
        file = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2)
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    """A process that has torch without its compiler, of which each test gets a fork."""
    with subprocess.Popen(
        [sys.executable, "-c", LIGHT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as it:
        yield it
        it.stdin.close()


@pytest.fixture
def light(server, tmp_path):
    """`light(code)`: what the code prints in a fresh process of that kind."""

    def run(code):
        said = tmp_path / "said"
        server.stdin.write(json.dumps([code, str(said)]) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        assert status == "0\n", said.read_text()
        return said.read_text().strip()

    return run


def test_an_optimiser_and_a_training_step_do_without(light):
    found = light("""
layer = torch.nn.Linear(2, 2)
optimiser = torch.optim.AdamW(layer.parameters(), lr=0.1)
before = layer.weight.tolist()
torch.utils.checkpoint.checkpoint(layer, torch.ones(1, 2), use_reentrant=False).sum().backward()
optimiser.step()
print(light(), layer.weight.tolist() != before)
""")
    assert found == "[True, True] True"


@pytest.mark.parametrize(
    "use",
    [
        "torch.compile(lambda x: x * 2, backend='eager')(torch.ones(2))",
        "from torch._dynamo.eval_frame import OptimizedModule",
        "torch._dynamo.is_compiling()",
        "torch._inductor.config.cpp",
    ],
)
def test_whatever_uses_it_has_it_executed(light, use):
    assert light(f"print(light()[0])\n{use}\nprint(light()[0])").splitlines() == ["True", "False"]


def test_a_module_of_it_is_imported_once(light):
    found = light("""
import torch._dynamo.convert_frame as frame
print(frame is torch._dynamo.convert_frame is sys.modules["torch._dynamo.convert_frame"])
print(type(frame.__spec__.loader).__name__, frame.__spec__.name, frame.__file__ == frame.__spec__.origin)
""")
    assert found.splitlines() == ["True", "SourceFileLoader torch._dynamo.convert_frame True"]


def test_a_module_that_comes_before_its_package_is_executed_once(light):
    """The package imports it meanwhile: of a second copy the compiler would not know."""
    found = light("""
from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslator
print(torch._dynamo.convert_frame.InstructionTranslator is InstructionTranslator, light()[0])
print(torch.compile(lambda x: (lambda y: y * 2)(x) + 1, fullgraph=True, backend="eager")(torch.ones(2)).tolist())
""")
    assert found.splitlines() == ["True False", "[3.0, 3.0]"]


def test_what_was_decorated_before_is_decorated_then(light):
    found = light("""
import warnings
@torch._dynamo.allow_in_graph
def allowed(x): return x + 1
@torch._dynamo.assume_constant_result
def constant(): return 3
@torch._dynamo.disable
def kept(x): return x * 2
@torch._dynamo.disable(recursive=False)
def also_kept(x): return x * 3
before = allowed(1), constant(), kept(1), also_kept(1), kept.__name__, light()[0]
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from torch._dynamo.trace_rules import is_callable_allowed
counter = CompileCounter()
compiled = torch.compile(lambda x: kept(allowed(x)) - constant(), backend=counter)
print(*before)
print(compiled(torch.ones(1)).tolist(), counter.frame_count, is_callable_allowed(allowed))
print(constant._dynamo_marked_constant, also_kept(torch.ones(1)).tolist())
""")
    assert found.splitlines() == ["2 3 2 3 kept True", "[1.0] 2 True", "True [3.0]"], "kept is no part of a graph"


def test_process_groups_do_without(light):
    found = light("""
import tempfile, torch.distributed as dist
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 1), rank=0, world_size=1)
    dist.destroy_process_group()
print(light())
""")
    assert found == "[True, True]"


def test_what_is_stood_in_for_is_there(light):
    """Names that torch has dropped need nobody in their place."""
    found = light("""
torch._dynamo.__spec__.loader.execute(torch._dynamo)
print({"graph_break", "disable", "trace_rules", "decorators", "allow_in_graph"} - set(vars(torch._dynamo)))
print(callable(torch._dynamo.trace_rules.clear_lru_cache))
print(callable(torch._dynamo.decorators.mark_unbacked), torch._dynamo.graph_break())
""")
    assert found.splitlines() == ["set()", "True", "True None"]


def test_modules_that_do_without_the_package_need_nothing_of_it(light):
    found = light("""
import importlib
for name in sorted(lazy_compiler.ALONE): importlib.import_module(name)
print(light())
""")
    assert found == "[True, True]"


def test_a_package_that_cannot_be_executed_says_so_each_time(light):
    found = light("""
loader = torch._dynamo.__spec__.loader
whole, loader.whole = loader.whole, None
for _ in range(2):
    try: torch._dynamo.optimize
    except AttributeError as error: print(error)
loader.whole = whole
print(callable(torch._dynamo.optimize), light()[0])
""")
    assert found.splitlines() == ["'NoneType' object has no attribute 'exec_module'"] * 2 + ["True False"]


def test_plain_values_are_checked_without_sympy():
    found = in_python("""
from prl import lazy_compiler
import torch
lazy_compiler.check_plainly()
lazy_compiler.check_plainly()
torch._check(True)
torch._check_value(True, lambda: "no")
print("sympy" in sys.modules)
for check, cond in ((torch._check, False), (torch._check_value, False), (torch._check, torch.tensor(True))):
    try: check(cond, lambda: "said")
    except Exception as error: print(type(error).__name__, str(error)[:12])
""")
    assert found.splitlines() == ["False", "RuntimeError said", "ValueError said", "TypeError cond must be"]
