"""Which modules a config may name, and what is said before they are imported."""

import json
import subprocess
import sys

import pytest

from prl.config import targets
from prl.config.instantiate import class_of, function
from prl.errors import ConfigError
from prl.orchestrator.algo.base import Algorithm

MINE = """
import os, subprocess
from subprocess import check_output
from os import path
from functools import partial, wraps

def credit(group, scale=1.0):
    return [scale] * len(group)

def kept(fn):
    @wraps(fn)
    def inner(*given):
        return fn(*given)
    return inner

@kept
def wrapped(group):
    return group
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A package of the user's, which nothing has been said of, with a module that its top re-exports from."""
    folder = tmp_path / "doors_mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .core import credit, check_output\n")
    (folder / "core.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(targets, "_said", set())
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "doors_mine"]:
        del sys.modules[name]


def test_a_function_of_the_users_is_said_once_and_made(mine, capsys):
    assert function({"_target_": "doors_mine.core.credit", "scale": 2.0}, "algo.fn")([1, 2]) == [2.0, 2.0]
    assert function({"_target_": "doors_mine.credit"}, "algo.fn")([1]) == [1.0]
    assert function({"_target_": "doors_mine.core.wrapped"}, "algo.fn")([1]) == [1]
    assert capsys.readouterr().err == "this config imports doors_mine\n"


def test_what_a_package_takes_from_another_is_no_function_of_it(mine):
    for target in ("doors_mine.core.check_output", "doors_mine.check_output", "doors_mine.core.wraps"):
        with pytest.raises(
            ConfigError, match=rf"^algo\.fn\._target_='{target}' is a function of \w+, which may not be"
        ):
            function({"_target_": target}, "algo.fn")
    for target in ("doors_mine.core.os.system", "doors_mine.core.subprocess.run"):
        with pytest.raises(ConfigError, match=rf"^algo\.fn\._target_='{target}': No module named"):
            function({"_target_": target}, "algo.fn")
    with pytest.raises(ConfigError, match="is not a Python function"):
        function({"_target_": "doors_mine.core.partial"}, "algo.fn")


@pytest.mark.parametrize("module", ["webbrowser", "antigravity", "idlelib.pyshell", "turtledemo.clock"])
def test_the_standard_library_is_refused_before_it_is_imported(module):
    sys.modules.pop(module, None)
    for find in (lambda node: function(node, "algo.fn"), lambda node: class_of(node, Algorithm, "algo.fn")):
        with pytest.raises(
            ConfigError, match=rf"^algo\.fn\._target_='{module}\.open': nothing of {module.split('.')[0]}"
        ):
            find({"_target_": f"{module}.open"})
    assert module not in sys.modules


LIBRARIES = [
    "torch.hub.load", "hydra.utils.instantiate", "hydra._internal.instantiate._instantiate2.instantiate",
    "transformers.pipeline", "vllm.utils.system_utils.decorate_logs", "pydantic.main.create_model", "yaml.load",
]  # fmt: skip
REFUSED = """
import json, sys
from prl.config.instantiate import function
from prl.errors import ConfigError
for target in sys.argv[1:]:
    before, said = set(sys.modules), None
    try:
        function({"_target_": target}, "loss")
    except ConfigError as error:
        said = str(error)
    new = [name for name in set(sys.modules) - before if name.split(".")[0] == target.split(".")[0]]
    print(json.dumps([target, said, new]))
"""


def test_a_function_of_a_library_is_refused_before_it_is_imported():
    argv = [sys.executable, "-c", REFUSED, *LIBRARIES]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    remedy = "is a library that prl uses: write a function of your own"
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        [target, f"loss._target_='{target}': {target.split('.')[0]} {remedy}", []] for target in LIBRARIES
    ]


def test_a_class_of_a_library_is_checked_by_its_base():
    with pytest.raises(ConfigError, match=r"^algo\._target_='hydra\.core\.plugins\.Plugins' is not a subclass of prl"):
        class_of({"_target_": "hydra.core.plugins.Plugins"}, Algorithm, "algo")
    from torch.optim import SGD, Optimizer

    assert class_of({"_target_": "torch.optim.SGD"}, Optimizer, "trainer.optim") is SGD


def test_the_libraries_are_those_of_the_installation():
    found = targets.libraries()
    assert {"torch", "hydra", "vllm", "transformers", "pydantic", "yaml", "verifiers"} <= found
    assert not {"users_own", "pip", "os"} & found


CONFIG = {
    "algo": {"_target_": "my_algo.Best", "fn": {"_target_": "my_algo.fns.credit"}},
    "trainer": {"optim": {"_target_": "torch.optim.AdamW"}, "schedule": {"_target_": "???"}},
    "envs": {
        "a": {"taskset": "my_env.tasks", "args": {"grader": {"_target_": "my_grades.near"}}},
        "b": {"taskset": "prl.envs.math", "args": {"grader": "exact"}, "filters": [{"_target_": "my_filter.Long"}]},
        "c": {"taskset": "owner/their-env@1.2", "args": {"grader": "my_other.grade"}},
        "d": {"renderer": {"_target_": "prl.inference.renderer.make_renderer", "import_path": "folder/own.py:Mine"}},
    },
    "teacher": {"base_url": None},
}


def test_everything_that_a_config_imports_is_said_in_one_line_before_it_is(tmp_path, monkeypatch, capsys):
    modules = {"my_algo", "my_env", "my_filter", "my_grades", "my_other", "their_env"}
    for name in modules:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('it is imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(targets, "_said", set())
    targets.announce(CONFIG)
    targets.announce(CONFIG)
    names = "folder/own.py, my_algo, my_env, my_filter, my_grades, my_other, their-env"
    assert capsys.readouterr().err == f"this config imports {names}\n"
    assert not modules & sys.modules.keys()


def test_nothing_is_said_of_prls_own(default_config, capsys):
    from prl.config.instantiate import plain

    targets.announce(plain(default_config))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [("taskset", "webbrowser"), ("taskset", "os.path"), ("taskset", "me/webbrowser@1"), ("taskset", "WebBrowser"),
     ("grader", "subprocess.run"), ("import_path", "os:path"), ("_target_", "shutil.rmtree")],
)  # fmt: skip
def test_nothing_of_the_standard_library_is_imported_by_any_key(key, value):
    with pytest.raises(ConfigError, match=rf"^envs\.a\.{key}='{value}': nothing of \w+ may be named, which comes with"):
        targets.announce({"envs": {"a": {key: value}}})
    if key == "taskset":
        from prl.episodes.environment import find_taskset

        with pytest.raises(ConfigError, match=rf"^envs\.a\.taskset='{value}': nothing of \w+ may be named"):
            find_taskset(value, "envs.a")


def test_a_name_with_an_escape_sequence_is_shown_harmless(monkeypatch, capsys):
    monkeypatch.setattr(targets, "_said", set())
    targets.announce({"import_path": "\x1b]0;mine\x07.py:Own", "taskset": "no_such_taskset"})
    assert capsys.readouterr().err == "this config imports \\x1b]0;mine\\x07.py\n"
