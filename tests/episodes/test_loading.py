"""Code of an env that runs before anything else: its ends are refusals."""

import pytest

SOURCE = """
class Loads(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        {body}
        yield vf.Task(vf.TaskData(prompt="?"))
__all__ = ["Loads"]
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import sys; sys.exit(3)", "envs.mine.args: loading the tasks of Loads failed: SystemExit: 3 ("),
        ("f = lambda n: f(n); f(0)", "envs.mine.args: loading the tasks of Loads failed: RecursionError: "),
    ],
)
def test_what_ends_a_load_is_a_refusal_with_env_and_class(module, refused, body, says):
    assert says in refused(module(SOURCE.format(body=body)))


def test_what_ends_an_import_is_a_refusal(module, refused):
    assert "importing it failed: SystemExit: 4 (" in refused(module("import sys\nsys.exit(4)\n"))
