"""Packages that are imported name by name: the same objects as of the whole package, and few modules."""

import json
import subprocess
import sys

import pytest

from prl import lazy_imports


def in_python(code: str) -> str:
    """What a fresh process prints that has imported prl."""
    done = subprocess.run([sys.executable, "-c", f"import prl, sys\n{code}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_launcher_imports_neither_torch_nor_all_of_what_verifiers_uses():
    heavy = ("torch", "sympy", "mcp", "openai.types.evals", "anthropic.resources")
    found = in_python(f"import prl.train, prl.launch.builder\nprint([name for name in {heavy} if name in sys.modules])")
    assert found == "[]"


@pytest.mark.parametrize("package", ["openai", "openai.types", "openai.types.chat", "anthropic", "anthropic.types"])
def test_each_name_is_that_of_the_whole_package(package):
    found = in_python(f"""
import importlib
lazy = importlib.import_module({package!r})
names = [name for name in lazy.__spec__.loader.names(lazy)]
before = {{name: getattr(lazy, name) for name in names}}
lazy.__spec__.loader.execute(lazy)
other = [name for name in names if name in vars(lazy) and vars(lazy)[name] is not before[name]]
print(len(names) > 20, other)
""")
    assert found == "True []"


def test_any_other_name_has_the_package_executed():
    assert in_python("import openai; print(openai.api_key, 'OpenAI' in vars(openai))") == "None True"
    assert in_python("from openai import *; print(OpenAIError.__mro__[1].__name__)") == "Exception"


def test_a_module_of_a_package_is_one_of_its_names():
    found = in_python("import openai; print(openai._exceptions.OpenAIError is openai.OpenAIError)")
    assert found == "True"


def test_a_name_that_is_not_there_is_said_to_be_missing():
    found = in_python("""
import openai
for name in ("nothing", "__nothing__"):
    try:
        getattr(openai, name)
    except AttributeError as error:
        print(error)
""")
    assert found.splitlines() == [f"module 'openai' has no attribute '{name}'" for name in ("nothing", "__nothing__")]


def test_functions_import_their_module_when_they_are_called():
    found = in_python("""
from math_verify import parse, verify
from math_verify.errors import TimeoutException
before = "sympy" in sys.modules
print(before, verify(parse("$\\\\frac{1}{2}$"), parse("$0.5$")), verify(parse("$1$"), parse("$2$")))
import math_verify
print("sympy" in sys.modules, math_verify.parse is parse, math_verify.LatexExtractionConfig.__name__)
""")
    assert found.splitlines() == ["False True False", "True False LatexExtractionConfig"]


def test_verifiers_verifies_mathematics_with_it():
    found = in_python("""
from verifiers.v1.utils.score import verify_boxed_math_answer
print(verify_boxed_math_answer("\\\\boxed{\\\\frac{2}{4}}", "1/2"), verify_boxed_math_answer("\\\\boxed{3}", "1/2"))
""")
    assert found == "1.0 0.0"


def test_scipy_is_imported_when_it_is_used():
    found = in_python("""
import scipy.signal as signal
from scipy.optimize import linear_sum_assignment
print("scipy.stats" in sys.modules, "scipy.linalg" in sys.modules)
print(linear_sum_assignment([[4, 1], [2, 3]])[1].tolist(), signal.resample_poly([1.0] * 8, 1, 2).shape)
from scipy.optimize import minimize_scalar
print(round(minimize_scalar(lambda x: (x - 2) ** 2).x, 3))
""")
    assert found.splitlines() == ["False False", "[1, 0] (4,)", "2.0"]


@pytest.fixture(scope="module")
def listed():
    """What one process finds of all names of the lists, by name: before any is executed, and after its own."""
    found = in_python("""
import importlib, json
from prl.lazy_imports import FUNCTIONS, PACKAGES
modules = {name: importlib.import_module(name) for name in sorted({*PACKAGES, *FUNCTIONS})}
def lazy(module): return [type(module.__spec__.loader).__name__, "__getattr__" in vars(module)]
found = {name: lazy(module) for name, module in modules.items()}
for name, module in modules.items():
    names = FUNCTIONS.get(name, ())
    found[name].append(all(callable(getattr(module, each)) for each in names))
    module.__spec__.loader.execute(module)
    found[name].append(set(names) <= set(vars(module)))
print(json.dumps(found))
""")
    return json.loads(found)


@pytest.mark.parametrize("name", sorted({*lazy_imports.PACKAGES, *lazy_imports.FUNCTIONS}))
def test_what_is_listed_is_there(listed, name):
    """A library that has dropped one of them needs no entry any more."""
    assert listed[name] == ["LazyLoader", True, True, True]


def test_other_modules_are_left_to_the_other_finders():
    for name in ("json", "openai.resources", "prl", "nothing_of_the_kind", "openai.types_"):
        assert lazy_imports.LazyFinder().find_spec(name, None) is None
