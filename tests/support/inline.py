"""Whole runs within the process of the tests: `engine=transformers`, and the trainer in a thread."""

import contextlib
import io
import os
import sys

import pytest
from engines import finished

IN_PROCESS = ("engine=transformers", "teacher=inline", "launcher=inline", "monitor.console.mode=plain")


@pytest.fixture
def inline_command(tmp_path):
    """The command line and environment of a run that is one process."""

    def make(*overrides, name="run"):
        keys = {override.partition("=")[0] for override in overrides}
        defaults = [default for default in IN_PROCESS if default.partition("=")[0] not in keys]
        argv = [sys.executable, "-m", "prl.train", *defaults, f"run.dir={tmp_path / name}", *overrides]
        return argv, {**os.environ, "OMP_NUM_THREADS": "1"}

    return make


@pytest.fixture
def inline(tmp_path, monkeypatch):
    """`inline(*overrides)`: what `python -m prl.train` would do with them, in this process, to its end.

    Without the page, whose faults no run fails by.
    """
    from prl.base.errors import ConfigError, PrlError
    from prl.config.compose import compose
    from prl.train import main

    monkeypatch.setattr("prl.tools.report.try_to_write", lambda run_dir: None)
    monkeypatch.syspath_prepend(tmp_path)  # where the command would be typed

    def run(*overrides, name="run"):
        status, stderr = 0, io.StringIO()
        with contextlib.redirect_stderr(stderr):
            try:
                main(compose([*IN_PROCESS, f"run.dir={tmp_path / name}", *overrides]))
            except KeyboardInterrupt:
                status = 130
            except PrlError as error:
                status = 2 if isinstance(error, ConfigError) else 1
                print(f"error: {error}", file=sys.stderr)
        return finished(tmp_path / name, status, stderr.getvalue())

    yield run
    for name, module in list(sys.modules.items()):  # of the test's own, whose name another test may use
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
