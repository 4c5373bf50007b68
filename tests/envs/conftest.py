"""Tasksets written for a test, and how an env that does not accept its settings is refused."""

import sys

import pytest

from prl.base.errors import ConfigError
from prl.config.schema import EnvConfig
from prl.envs.environment import Environment

HEAD = "import verifiers.v1 as vf\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`module(source)` makes `package_of_tests.tasks` out of `source`, and gives its name."""
    folder = tmp_path / "package_of_tests"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def make(source):
        (folder / "tasks.py").write_text(HEAD + source)
        return "package_of_tests.tasks"

    yield make
    for name in ("package_of_tests.tasks", "package_of_tests"):
        sys.modules.pop(name, None)


@pytest.fixture
def refused():
    """`refused(taskset, args)`: the message of the ConfigError."""

    def message(taskset, args=None):
        with pytest.raises(ConfigError) as caught:
            Environment("mine", EnvConfig(taskset=taskset, args=args or {}), eval_tasks=0)
        return str(caught.value)

    return message
