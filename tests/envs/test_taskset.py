"""Loading tasksets: found, configured, and refused with the key that is wrong."""

import sys

import pytest

from prl.base.errors import ConfigError
from prl.config.schema import EnvConfig
from prl.envs.environment import Environment

ONE = "class One(vf.Taskset[vf.Task, vf.TasksetConfig]):\n    def load(self):\n        {body}\n"


def test_user_taskset_is_found_by_its_dotted_path(module):
    name = module(ONE.format(body="yield vf.Task(vf.TaskData(prompt='hi'))") + "__all__ = ['One']\n")
    (task,) = Environment("mine", EnvConfig(taskset=name), eval_tasks=0).tasks
    assert task.data.prompt == "hi" and task.data.idx == 0


@pytest.mark.parametrize(
    ("taskset", "says"),
    [
        ("no.such.module", "envs.mine.taskset='no.such.module': No module named 'no'; is the package installed?"),
        ("no_such_taskset_at_all", "envs.mine.taskset='no_such_taskset_at_all'"),
        ("prl.base.errors", "must export exactly one Taskset in __all__, has 0"),
    ],
)
def test_a_taskset_that_is_not_there_is_refused(taskset, says, refused):
    assert says in refused(taskset)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("class :\n", "SyntaxError"),
        ("import sys\nsys.exit(4)\n", "SystemExit: 4 ("),
    ],
)
def test_module_that_fails_to_import_is_refused(module, source, message, refused):
    assert f"envs.mine.taskset='package_of_tests.tasks': importing it failed: {message}" in refused(module(source))


@pytest.mark.parametrize(
    ("source", "imports", "missing"),
    [
        ("import numpy_x\n", None, "numpy_x"),
        ("import numpy_x.linalg as la\n", None, "numpy_x"),
        ("from package_of_tests.helper import f\n", "import pandas_y\n", "pandas_y"),
        ("import package_of_tests.nothing\n", None, "package_of_tests.nothing"),
        (ONE.format(body="import numpy_x") + "__all__ = ['One']\n", None, "numpy_x"),
    ],
)
def test_a_module_that_an_env_lacks_is_named_and_not_the_env(module, source, imports, missing, refused, tmp_path):
    name, asks = module(source), "tasks.py"
    if imports is not None:
        asks = "helper.py"
        (tmp_path / "package_of_tests" / asks).write_text(imports)
    message = refused(name)
    assert f"No module named {missing!r}" in message and f"pip install {missing.partition('.')[0]}" in message
    assert asks in message and "is the package installed?" not in message


def test_a_module_that_an_installed_env_lacks_is_named(tmp_path, monkeypatch, refused):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "an_installed_env.py").write_text("import numpy_x\n")
    assert "No module named 'numpy_x'" in refused("an-installed-env")
    assert "taskset 'no-such-env' not found" in refused("no-such-env")


@pytest.mark.parametrize(
    "source",
    [
        "import verifiers as vf\ndef load_environment(**kwargs):\n    return vf.SingleTurnEnv(rubric=vf.Rubric())\n",
        "import verifiers as vf\nclass Mine(vf.MultiTurnEnv):\n    pass\n",
        "from verifiers import SingleTurnEnv, Rubric\n",
        "from verifiers.envs.multiturn_env import MultiTurnEnv\n",
        "import numpy_x\nimport verifiers as vf\ndef load_environment():\n    return vf.ToolEnv()\n",
        "from package_of_tests.env import load_environment\n",
    ],
)
def test_an_environment_of_v0_is_named_as_that(module, source, refused, tmp_path):
    name = module("")
    (tmp_path / "package_of_tests" / "tasks.py").write_text(source)
    message = refused(name)
    assert message.startswith("envs.mine.taskset='package_of_tests.tasks' is an environment of verifiers v0")
    assert "EXTENDING.md" in message


@pytest.mark.parametrize(
    "source",
    ["import verifiers as vf\nEnv = vf.SingleTurnEnv\n", "def load_environment(**kwargs):\n    pass\n"],
)
def test_a_package_of_v0_that_says_so_in_another_file_is_named(module, source, refused, tmp_path):
    name = module("from package_of_tests.main import *\n").replace(".tasks", "_of_v0")
    (tmp_path / f"{name}.py").write_text("from package_of_tests.main import *\n")
    (tmp_path / "package_of_tests" / "main.py").write_text(source)
    assert "is an environment of verifiers v0" in refused(name)
    sys.modules.pop("package_of_tests.main", None)
    sys.modules.pop(name, None)


def test_a_failing_taskset_of_v1_with_an_old_name_in_it_is_none_of_v0(module, refused):
    message = refused(module("import numpy_x\ndef load_environment():\n    pass\n"))
    assert "No module named 'numpy_x'" in message and "v0" not in message


def test_a_taskset_of_v1_that_says_from_verifiers_import_v1_is_none_of_v0(module, refused):
    assert "ZeroDivisionError" in refused(module("from verifiers import v1\n1 / 0\n"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"max_operandd": 3}, "envs.mine.args.max_operandd:"),
        ({"max_operand": "many"}, "envs.mine.args.max_operand:"),
        ({"max_operand": 0}, "envs.mine.args.max_operand:"),
        ({"operations": ["+", "^"]}, "envs.mine.args.operations.1:"),
    ],
)
def test_unknown_setting_is_refused_with_the_known_ones(args, says, refused):
    message = refused("prl.envs.tasksets.math", args)
    assert message.startswith(says)
    assert "settings of prl.envs.tasksets.math: split, num_tasks, seed, max_operand, operations" in message


def test_refusal_by_a_taskset_names_its_key(refused):
    assert refused("prl.envs.tasksets.reverse_text", {"min_length": 9, "max_length": 3}).startswith("envs.mine.args:")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return iter(())", "has no task with these settings"),
        ("raise ValueError('no data for these settings')", "envs.mine.args: no data for these settings"),
        ("yield vf.Task(vf.TaskData(prompt=None))", "no prompt"),
        ("import sys; sys.exit(3)", "envs.mine.args: loading the tasks of One failed: SystemExit: 3 ("),
        (
            "part = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url='data:image/png;base64,AA'))\n"
            "        yield vf.Task(vf.TaskData(prompt=[vf.UserMessage(content=[part])]))",
            "envs.mine.args: message 1 is no text: prl shows a model no pictures or sounds (type='image_url'",
        ),
        ("raise KeyError('question')", "envs.mine.args: loading the tasks of One failed: KeyError: 'question' ("),
    ],
)
def test_a_taskset_without_a_task_to_play_is_refused(module, body, says, refused):
    assert says in refused(module(ONE.format(body=body) + "__all__ = ['One']\n"))


def test_a_taskset_without_an_end_is_capped(module, monkeypatch):
    monkeypatch.setattr("prl.envs.environment.MAX_TASKS", 25)
    body = "i = 0\n        while True:\n            yield vf.Task(vf.TaskData(prompt=str(i)))\n            i += 1"
    name = module(ONE.format(body=body) + "__all__ = ['One']\n")
    assert len(Environment("mine", EnvConfig(taskset=name), eval_tasks=0).tasks) == 25


def test_the_eval_settings_are_refused_under_their_own_key():
    config = EnvConfig(taskset="prl.envs.tasksets.math", args={"num_tasks": 3}, eval_args={"splitt": "eval"})
    with pytest.raises(ConfigError, match=r"^envs\.math\.eval_args\.splitt:"):
        Environment("math", config, eval_tasks=1)
